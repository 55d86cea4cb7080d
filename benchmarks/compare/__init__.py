"""A comparison of optimizers at equal budgets: its plan, its runs, its results on disk, and what is shown of them."""
