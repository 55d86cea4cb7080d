"""Adapters of layers other than Linear and convolutions."""

from secondorder.curvature.adapters.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from secondorder.curvature.adapters.norms import (
    BatchNormAdapter,
    GroupNormAdapter,
    InstanceNormAdapter,
    LayerNormAdapter,
    RMSNormAdapter,
)
from secondorder.curvature.adapters.others import (
    BilinearAdapter,
    StackedAdapter,
    TransposedLinearAdapter,
    hugging_face_conv1d,
)
from secondorder.curvature.adapters.transposed import ConvTransposeAdapter

__all__ = [
    "BatchNormAdapter",
    "BilinearAdapter",
    "ConvTransposeAdapter",
    "EmbeddingAdapter",
    "EmbeddingBagAdapter",
    "GroupNormAdapter",
    "InstanceNormAdapter",
    "LayerNormAdapter",
    "RMSNormAdapter",
    "StackedAdapter",
    "TransposedLinearAdapter",
    "hugging_face_conv1d",
]
