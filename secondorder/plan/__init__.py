"""Plans: what a run stores, sends and computes on every rank, without running it.

The code that sends messages is run on a strategy that counts them, with tensors that hold no data.
"""
