"""The methods: one file and one class for each, with its mathematics and its signature.

A method defines the state of a layer or of a window, its refresh, and the preconditioning with it. The stages
of a step, which all methods share, are in ``preconditioners/``.
"""
