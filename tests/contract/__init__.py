"""Every promise of `torch.optim`, one file each, for every method of the registry in `methods.py`."""
