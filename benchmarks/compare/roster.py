"""Who can take part in a comparison: the methods of this package, their variants, and the optimizers of others."""

from benchmarks.peers import PEERS
from benchmarks.recipes import METHODS, Method


def find(name: str) -> Method:
    """Return an optimizer by its name.

    Args:
        name: Key of ``METHODS`` or of ``PEERS``.

    Returns:
        The optimizer.

    Raises:
        ValueError: When there is none of that name.
    """
    everyone: dict[str, Method] = {**PEERS, **{str(key): method for key, method in METHODS.items()}}
    if name not in everyone:
        raise ValueError(f"optimizers must be of {', '.join(everyone)}, got {name!r}")
    return everyone[name]
