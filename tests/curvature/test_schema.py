"""Schemas of states: what each rank holds and sends, and the schema of every method compared with its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, LowRank, SparseMFAC
from secondorder.curvature.schema import Entry, Place, keys, kinds, nbytes, stored_at
from tests.support.building import built
from tests.support.kfac import labels, noise

SCHEMA = {
    "second": Entry(torch.empty(3, 3), "factors", Place.ESTIMATE, symmetric=True),
    "first": Entry(torch.empty(2), "factors", Place.ESTIMATE),
    "number": Entry(7, "buffers", Place.EVERYWHERE),
    "known": Entry(torch.empty(()), "buffers", Place.CURVATURE, known=True),
    "found": Entry(torch.empty(4), "second_order", Place.CURVATURE, derived=True),
    "own": Entry(torch.empty(6), "momentum", Place.OWN),
}


def test_a_rank_holds_numbers_and_the_tensors_of_its_places() -> None:
    assert list(stored_at(SCHEMA, set(Place))) == list(SCHEMA)
    assert list(stored_at(SCHEMA, {Place.ESTIMATE})) == ["second", "first", "number"]
    assert list(stored_at(SCHEMA, {Place.MEASURED, Place.OWN})) == ["number", "own"]
    assert list(stored_at(SCHEMA, set())) == ["number"]


def test_keys_of_a_place_are_sorted_and_without_numbers() -> None:
    assert keys(SCHEMA, Place.ESTIMATE) == keys(dict(reversed(SCHEMA.items())), Place.ESTIMATE) == ["first", "second"]
    assert keys(SCHEMA, Place.CURVATURE) == ["found", "known"]
    assert keys(SCHEMA, Place.CURVATURE, known=False) == ["found"]  # every holder finds "known" by itself
    assert keys(SCHEMA, Place.EVERYWHERE) == keys(SCHEMA, Place.MEASURED) == []


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {}),
    "kfac cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "kfac packed": (KFAC, {"factor_storage": "packed", "factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}),
    "kfac diagonal": (KFAC, {"max_factor_dim": 1, "inverse_method": "cholesky"}),
    "kfac one diagonal": (KFAC, {"max_factor_dim": 8, "inverse_method": "cholesky"}),
    "kfac overlap": (KFAC, {"overlap": True, "decay_per_step": True}),
    "ekfac": (EKFAC, {}),
    "ekfac qr": (EKFAC, {"basis_update": "qr", "transport": "kfac", "decay_per_step": True}),
    "ekfac pre": (EKFAC, {"momentum_mode": "pre"}),
    "hylo": (HyLo, {}),
    "hylo or factors": (HyLo, {"kfac_when_cheaper": True}),
    "mfac": (MFAC, {"window_size": 3, "momentum": 0.9, "momentum_mode": "pre"}),
    "mfac lowrank": (MFAC, {"window_size": 3, "compression": LowRank(2)}),
    "sparse": (SparseMFAC, {"window_size": 3}),
    "ggt": (GGT, {"window_size": 3}),
}
FIRST_ORDER = {"step", "global_step", "momentum_buffer", "exp_avg", "exp_avg_sq", "switch_state"}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def _trained(cls: Any, chosen: dict[str, Any]) -> Any:
    model = _net()
    opt = built(cls, model, lr=0.01, **chosen)
    for step in range(3):
        opt.zero_grad()
        cross_entropy(model(noise(6, 4, 4, 4, seed=step).float()), labels(6, 3, step)).backward()
        opt.step()
    return opt


@pytest.mark.parametrize(("cls", "chosen"), METHODS.values(), ids=METHODS)
def test_the_schema_is_the_state(cls: Any, chosen: dict[str, Any]) -> None:
    """This includes keys, shapes, symmetry, kinds of memory, and the facts in the catalog of the method."""
    opt = _trained(cls, chosen)
    schemas = {
        p: opt._checkpoint.curvature.schema_of(p, group, opt.state[p])
        for group in opt.param_groups
        for p in group["params"]
    }
    assert any(schemas.values())
    sizes = dict.fromkeys(kinds(opt.preconditioner.table.entries), 0)
    for p, schema in schemas.items():
        state = {key: value for key, value in opt.state[p].items() if key not in FIRST_ORDER}
        required = {key for key, entry in schema.items() if not entry.optional}
        assert required <= state.keys() <= schema.keys()
        for key, value in state.items():
            like = schema[key].like
            assert isinstance(like, Tensor if isinstance(value, Tensor) else int), key
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype) == (like.shape, like.dtype), key
        for key, entry in schema.items():
            fact = opt._recipe.catalog[key]
            assert (entry.kind, entry.derived, entry.always) == (fact.kind, fact.derived, fact.always)
            if entry.symmetric:
                torch.testing.assert_close(opt.state[p][key], opt.state[p][key].mT, msg=key)
        for kind, size in nbytes({key: entry for key, entry in schema.items() if key in opt.state[p]}).items():
            sizes[kind] += size
    usage = opt.memory_usage()
    assert sizes.keys() <= usage.keys()
    for kind in sizes.keys() - {"buffers", "momentum"}:  # these include more than curvature
        assert usage[kind] == sizes[kind], kind
    opt.close()
