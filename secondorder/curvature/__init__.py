"""The curvature of one layer: what is estimated, what a refresh makes of it, and how it preconditions.

Factors and their inverses or eigenbases, rows of examples with their kernel, and the schedule of refreshes are here.
The statistics that come in are collected in ``capture/``, and the mathematics is in ``linalg/``.
"""
