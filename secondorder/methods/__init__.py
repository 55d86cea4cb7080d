"""The methods: one file and one class for each, with its mathematics and its signature.

A method says what to keep of a layer or of a window, how to refresh it, and how to precondition with it. The stages
of a step, which all methods share, are in ``preconditioners/``.
"""
