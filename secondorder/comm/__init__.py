"""Communication strategies: who does which stage of a step."""

from secondorder.comm.strategy import CommStrategy, Local

__all__ = ["CommStrategy", "Local"]
