"""Communication strategies: who does which stage of a step."""

from secondorder.comm.strategy import CommStrategy, Local, Parcel, Shard, Unit, world_size


def default_strategy() -> CommStrategy:
    """What ``comm=None`` stands for."""
    return Local()


__all__ = ["CommStrategy", "Local", "Parcel", "Shard", "Unit", "default_strategy", "world_size"]
