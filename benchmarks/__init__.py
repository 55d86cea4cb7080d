"""Benchmarks of ``secondorder``: four workloads, their recipes, and the commands of ``python -m benchmarks``."""
