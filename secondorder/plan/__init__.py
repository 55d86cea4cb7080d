"""Plans predict what a run stores, sends and computes on every rank, without running it.

A plan runs the code that sends messages with a strategy that only counts them, on tensors without data.
"""
