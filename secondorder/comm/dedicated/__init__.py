"""The strategy with dedicated workers: some ranks train, some estimate factors, some invert them.

The modules here contain the strategy, its arguments, the roles of the ranks, and the messages between them.
"""
