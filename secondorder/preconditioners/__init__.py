"""The stages of a step over all blocks of a module, or over windows of past gradients.

The modules here decide what is due, collect the statistics of a step, refresh and share the curvature, and turn
gradients into directions. What a single layer knows is in ``curvature/``, and what ranks tell each other in
``parallel/``.
"""
