"""Comparisons of optimizers with equal budgets: plan, runs, statistics and report."""
