"""Benchmarks of ``secondorder``: workloads, their recipes, and the commands of ``python -m benchmarks``."""
