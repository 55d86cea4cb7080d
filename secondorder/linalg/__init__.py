"""Linear algebra: pure functions that take tensors and return tensors.

No function here knows a module, a parameter group, a rank or a schedule. Shapes are given in brackets, and the
letters are those of the papers.
"""
