"""Adapters of layer types: how inputs and output gradients of a layer become rows.

There is one adapter for each type of layer, a registry of them, and the maps that a module applies without calling a
layer. Nothing here knows an optimizer.
"""
