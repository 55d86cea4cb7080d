"""Communication strategies: who does which stage of a step."""

from secondorder.comm.chief_only import ChiefOnly
from secondorder.comm.comm_opt import CommOpt
from secondorder.comm.dedicated.workers import DedicatedWorkers
from secondorder.comm.hybrid_opt import HybridOpt
from secondorder.comm.local_factors import LocalFactors
from secondorder.comm.mem_opt import MemOpt
from secondorder.comm.names import from_name
from secondorder.comm.rank_grid import RankGrid
from secondorder.comm.strategy import CommStrategy, Local, Parcel, Pending, Shard, Unit, world_size
from secondorder.plan.plan import Plan, RankPlan


def default_strategy(cut: bool = False) -> CommStrategy:
    """What ``comm=None`` stands for: :class:`CommOpt` in a process group of more than one rank.

    Args:
        cut: Whether parameters are cut over the ranks (FSDP2): then :class:`MemOpt`, which cuts curvature, too.

    Returns:
        A new strategy.
    """
    if world_size() == 1:
        return Local()
    return MemOpt() if cut else CommOpt()


__all__ = [
    "ChiefOnly",
    "CommOpt",
    "CommStrategy",
    "DedicatedWorkers",
    "HybridOpt",
    "Local",
    "LocalFactors",
    "MemOpt",
    "Parcel",
    "Pending",
    "Plan",
    "RankGrid",
    "RankPlan",
    "Shard",
    "Unit",
    "default_strategy",
    "from_name",
    "world_size",
]
