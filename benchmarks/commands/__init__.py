"""The commands of ``python -m benchmarks``, with one file per command."""
