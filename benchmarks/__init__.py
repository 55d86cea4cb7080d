"""Benchmarks of ``secondorder``: five workloads, their recipes, and the commands of ``python -m benchmarks``."""
