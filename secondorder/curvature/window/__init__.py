"""Windows of past gradients: a ring of rows, stored densely, as largest entries, or at low rank.

The modules store, add and combine rows. ``linalg/`` contains the mathematics of the Gram matrix of a window.
"""
