"""Statistics of one layer: sums and rows that are collected during the backward pass.

The modules contain Kronecker factors, squares in an eigenbasis and rows of examples, with their means over time.
"""
