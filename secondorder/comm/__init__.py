"""Communication strategies, which decide which rank does which stage of a step."""

from secondorder.comm.chief_only import ChiefOnly
from secondorder.comm.comm_opt import CommOpt
from secondorder.comm.dedicated.workers import DedicatedWorkers
from secondorder.comm.hybrid_opt import HybridOpt
from secondorder.comm.local_factors import LocalFactors
from secondorder.comm.mem_opt import MemOpt
from secondorder.comm.names import default_strategy, from_name
from secondorder.comm.rank_grid import RankGrid
from secondorder.comm.strategy import CommStrategy, Local, Parcel, Pending, Shard, Unit, world_size
from secondorder.plan.plan import Plan, RankPlan

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
