"""What an optimizer tells about itself."""

from secondorder.diagnostics.preconditioning import quantify_preconditioning

__all__ = ["quantify_preconditioning"]
