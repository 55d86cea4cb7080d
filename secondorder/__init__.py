"""Second-order optimizers for PyTorch. Each method is a ``torch.optim.Optimizer`` that replaces yours in one line."""

from secondorder import nn as nn
from secondorder.capture.fisher.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.layers.registry import register_layer
from secondorder.comm import ChiefOnly, CommOpt, DedicatedWorkers, HybridOpt, LocalFactors, MemOpt
from secondorder.config import (
    AdaptationOptions,
    BatchOptions,
    BudgetOptions,
    ClipOptions,
    FallbackOptions,
    FisherOptions,
    InverseOptions,
    RefreshOptions,
    RowOptions,
    ScaleOptions,
    StatisticsOptions,
    StorageOptions,
    WindowOptions,
)
from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.topk import TopK
from secondorder.factory import create, estimate
from secondorder.linalg.inverse_fisher import inverse_fisher_diagonal, inverse_fisher_vector_product
from secondorder.methods.ekfac import EKFAC
from secondorder.methods.ggt import GGT
from secondorder.methods.groups import matrix_groups
from secondorder.methods.hylo import HyLo
from secondorder.methods.kfac import KFAC
from secondorder.methods.mfac import MFAC, SparseMFAC
from secondorder.methods.presets import Preset, presets
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.plan.estimate import Estimate, MethodEstimate
from secondorder.plan.rates import MachineRates
from secondorder.schedule import ParamScheduler

__version__ = "0.1.0"

#: ``nn`` is missing, because ``from secondorder import *`` must not replace the ``nn`` of ``from torch import nn``.
__all__ = [
    "EKFAC", "GGT", "KFAC", "MFAC", "AdaptationOptions", "Adapter", "BatchOptions", "Bernoulli", "BudgetOptions",
    "Categorical", "ChiefOnly", "ClipOptions", "CommOpt", "DedicatedWorkers", "Estimate", "FallbackOptions",
    "FisherOptions", "Gaussian", "HyLo", "HybridOpt", "InverseOptions", "Likelihood", "LocalFactors", "LowRank",
    "MachineRates", "MemOpt", "MethodEstimate", "ParamScheduler", "Preset", "RefreshOptions", "RowOptions",
    "ScaleOptions", "SecondOrderOptimizer", "SparseMFAC", "StatisticsOptions", "StorageOptions", "TopK",
    "WindowOptions", "__version__", "create", "estimate", "inverse_fisher_diagonal", "inverse_fisher_vector_product",
    "matrix_groups", "presets", "register_layer",
]  # fmt: skip
