"""The strategy with dedicated workers: some ranks train, some estimate factors, and some invert them.

The modules contain the strategy, its arguments, the roles of the ranks, and the messages between them.
"""
