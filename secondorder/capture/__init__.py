"""Capture of the statistics of each layer from the forward and backward passes of a training loop.

Hooks on the layers of the user's model count examples and collect rows during the backward pass, without changing
either pass. The folders contain the adapters of layer types, the Fishers, and the statistics.
"""
