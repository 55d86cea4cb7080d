"""Adaptation: damping and step size that follow the loss.

The modules evaluate the closure of a step, compare the loss with its quadratic model, change the damping, reject steps,
and calibrate the damping.
"""
