"""Fishers, which determine the captured gradients, and the likelihoods of the loss.

The empirical Fisher uses the gradients of the loss. All others pull the curvature of a likelihood at the outputs of the
model back to its layers, in separate backward passes.
"""
