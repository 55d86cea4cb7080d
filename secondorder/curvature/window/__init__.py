"""Windows of past gradients: a ring of rows, stored densely, as largest entries, or at low rank.

The modules here store rows, add new ones, and combine them. The mathematics of the small Gram matrix of a window is
in ``linalg/``.
"""
