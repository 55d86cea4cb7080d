"""Capture: from the forward and backward passes of a training loop to the statistics of each layer.

Hooks sit on the layers of the user's model, count examples and collect rows during the backward pass, without
changing either pass. The folders below have the adapters of layer types, the Fishers, and the statistics that are
collected.
"""
