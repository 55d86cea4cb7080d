"""Second-order training for PyTorch by changing one line: each method is a ``torch.optim.Optimizer``."""

from secondorder import nn as nn
from secondorder.comm import ChiefOnly, CommOpt, DedicatedWorkers, HybridOpt, LocalFactors, MemOpt
from secondorder.curvature.inverse_fisher import inverse_fisher_diagonal, inverse_fisher_vector_product
from secondorder.curvature.layers import Adapter
from secondorder.curvature.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from secondorder.curvature.lowrank import LowRank
from secondorder.curvature.registry import register_layer
from secondorder.curvature.topk import TopK
from secondorder.factory import create
from secondorder.methods.ekfac import EKFAC
from secondorder.methods.ggt import GGT
from secondorder.methods.hylo import HyLo
from secondorder.methods.kfac import KFAC
from secondorder.methods.mfac import MFAC, SparseMFAC
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.schedule import ParamScheduler

__version__ = "0.1.0"

#: Without ``nn``: ``from secondorder import *`` must not replace the ``nn`` of ``from torch import nn``.
__all__ = [
    "EKFAC",
    "GGT",
    "KFAC",
    "MFAC",
    "Adapter",
    "Bernoulli",
    "Categorical",
    "ChiefOnly",
    "CommOpt",
    "DedicatedWorkers",
    "Gaussian",
    "HyLo",
    "HybridOpt",
    "Likelihood",
    "LocalFactors",
    "LowRank",
    "MemOpt",
    "ParamScheduler",
    "SecondOrderOptimizer",
    "SparseMFAC",
    "TopK",
    "__version__",
    "create",
    "inverse_fisher_diagonal",
    "inverse_fisher_vector_product",
    "register_layer",
]
