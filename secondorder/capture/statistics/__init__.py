"""Statistics of one layer: sums and rows that fill up during the backward pass.

The modules here have Kronecker factors, squares in an eigenbasis and rows of examples, the batch means that become of
them, and their running averages.
"""
