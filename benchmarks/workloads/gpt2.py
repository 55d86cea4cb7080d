"""GPT-2 small (Radford et al., "Language models are unsupervised multitask learners", 2019) on a text.

The layers are pre-norm, with the tanh approximation of GELU. Weights are drawn with standard deviation 0.02, those of
the positions with 0.01, and those of the layers that write to the residual stream with 0.02 divided by the square root
of their number. Biases are zero. With the 50,257 byte pairs of GPT-2, the published shape has 124,439,808 parameters.
The small sizes use characters as tokens.

The published shape ties its head to the token embedding. The small sizes do not: methods that work on layers have one
block for a tied weight, with the curvature of only one of its two uses.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import DataMissingError, Size, optional_package
from benchmarks.workloads.chargpt import GPT, CharGPT

FILES = ("vocab.json", "merges.txt")
_STD, _POSITION_STD = 0.02, 0.01


@dataclass(frozen=True)
class GPT2(CharGPT):
    """Cross-entropy of the next token, averaged over all tokens of the batch."""

    batch_size: int = 8
    width: int = 256
    tied: bool = False  # whether the head shares its weight with the token embedding
    pieces: str | None = None
    """Folder with the vocab.json and merges.txt of GPT-2, for Transformers. Without it, tokens are characters."""

    name: ClassVar[str] = "gpt2_small"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 600_000}

    # The batch size and context of nanoGPT's config/train_gpt2.py: 480 times 1,024 tokens, for several GPUs. The user
    # has to provide the text of that run, OpenWebText.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 480, "context": 1024, "width": 768, "layers": 12, "heads": 12, "tied": True,
    }  # fmt: skip

    @classmethod
    def of_size(cls, size: Size, data_dir: Path | None = None) -> Self:
        folder = (data_dir or Path()) / "gpt2"
        known = size == "paper" and all((folder / name).is_file() for name in FILES)
        return replace(super().of_size(size, data_dir), pieces=str(folder) if known else None)

    def network(self) -> nn.Module:
        return self.architecture(self._vocabulary)

    def architecture(self, vocabulary: int) -> GPT:
        shape, activation = (self.context, self.width, self.layers, self.heads), partial(nn.GELU, approximate="tanh")
        model = GPT(vocabulary, *shape, tied=self.tied, activation=activation, dropout=self.dropout)
        initialise(model)
        return model

    @cached_property
    def _byte_pairs(self) -> Any:
        folder = Path(str(self.pieces))
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise DataMissingError(folder, missing, self.name)
        return optional_package("transformers", "text").GPT2Tokenizer.from_pretrained(folder)

    @cached_property
    def _tokens(self) -> Tensor:
        if self.pieces is None:
            return super()._tokens
        return torch.tensor(self._byte_pairs.encode(self._text))

    @property
    def _vocabulary(self) -> int:
        return super()._vocabulary if self.pieces is None else len(self._byte_pairs)


def initialise(model: GPT) -> None:
    """Initialize the weights as in GPT-2, except for those of norms."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_POSITION_STD if module is model.positions else _STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    layers: Any = model.layers
    ends = [linear for layer in layers for linear in (layer.attention.out, layer.mlp[-1])]
    for linear in ends:
        nn.init.normal_(linear.weight, std=_STD / math.sqrt(len(ends)))
