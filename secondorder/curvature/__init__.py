"""The curvature of one layer: its estimate, the results of a refresh, and the preconditioning with them.

The modules contain factors and their inverses or eigenbases, rows of examples with their kernel, and the schedule of
refreshes. ``capture/`` collects the statistics, and ``linalg/`` contains the mathematics.
"""
