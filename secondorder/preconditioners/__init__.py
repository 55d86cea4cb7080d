"""The stages of a step over all blocks of a module, or over windows of past gradients.

The modules decide what is due, collect the statistics of a step, refresh and share the curvature, and turn gradients
into directions. ``curvature/`` contains the curvature of single layers, and ``parallel/`` the messages between ranks.
"""
