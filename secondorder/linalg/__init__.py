"""Linear algebra: pure functions that take tensors and return tensors.

No function here depends on a module, a parameter group, a rank or a schedule. Shapes are given in brackets, and symbols
are those of the papers.
"""
