"""Checkpoints: what the state of an optimizer must hold, and how a loaded one is compared with it.

Everything is checked before anything is changed, so that a checkpoint that does not fit leaves the optimizer as it
was.
"""
