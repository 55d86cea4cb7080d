"""Second-order training for PyTorch by changing one line: each method is a ``torch.optim.Optimizer``."""

from secondorder.methods.kfac import KFAC
from secondorder.optimizer import SecondOrderOptimizer

__version__ = "0.1.0.dev0"

__all__ = ["KFAC", "SecondOrderOptimizer", "__version__"]
