"""Checkpoints: the required content of the state of an optimizer, and the comparison with a loaded state.

Everything is checked before anything is changed, so a checkpoint that does not match leaves the optimizer unchanged.
"""
