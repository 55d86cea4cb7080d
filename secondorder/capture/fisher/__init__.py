"""Fishers: whose gradients are captured, and the likelihoods from which they are drawn.

The empirical Fisher takes the gradients of the loss. All others pull the curvature of a likelihood at the outputs of
the model back to its layers, in passes of their own.
"""
