"""Adaptation: damping and the size of a step, as the loss demands them.

The modules here evaluate the closure of a step, compare the loss with its quadratic model, change the damping, reject
steps, and calibrate.
"""
