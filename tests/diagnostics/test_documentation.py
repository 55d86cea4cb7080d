"""The tables of docs/diagnostics.md name exactly the keys that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secondorder import GGT, KFAC, MFAC, HyLo, SparseMFAC
from secondorder.diagnostics import quantify_preconditioning
from tests.support.building import built

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "diagnostics.md").read_text(encoding="utf-8")


def keys_in_tables() -> set[str]:
    first_cells = re.findall(r"^\| (`.+?) \|", PAGE, re.M)
    return {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}


def of_a_window(cls: Any, **keywords: Any) -> set[str]:
    model = nn.Linear(30, 4)
    optimizer = built(cls, model, window_size=3, **keywords)
    model(torch.randn(5, 30)).square().sum().backward()
    optimizer.step()
    (unit,) = optimizer.diagnostics()["units"].values()
    return set(unit)


def test_every_key_has_a_row() -> None:
    measures = quantify_preconditioning(torch.ones(3), torch.ones(3), histogram=True)
    of_layers = (cls(nn.Linear(3, 2)).diagnostics() for cls in (KFAC, HyLo))
    assert keys_in_tables() == of_a_window(SparseMFAC).union(measures, *of_layers)


@pytest.mark.parametrize("cls", [MFAC, GGT])
def test_a_dense_window_lacks_only_keys_of_compression(cls: Any) -> None:
    assert of_a_window(SparseMFAC) - of_a_window(cls) == {"sent_energy", "residual_norm", "residual_ratio"}
