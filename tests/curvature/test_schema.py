"""Schemas of states: queries of plain schemas, and the schema of every method compared with its state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, LowRank, SparseMFAC
from secondorder.curvature.block import Block
from secondorder.curvature.schema import (
    COUNTER,
    ESTIMATE,
    FOUND,
    Entry,
    Place,
    held,
    keys,
    kinds,
    known,
    likes,
    nbytes,
    of_kinds,
    shaped,
    tensors,
)
from tests.support.building import built
from tests.support.kfac import labels, noise


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SCHEMA = {
    "second": Entry(meta(3, 3), "factors", Place.ESTIMATE, symmetric=True),
    "first": Entry(meta(2), "factors", Place.ESTIMATE),
    "number": Entry(7, "buffers", Place.EVERYWHERE),
    "found": Entry(meta(4, dtype=torch.float64), "second_order", Place.CURVATURE, derived=True),
    "known": Entry(meta(), "buffers", Place.CURVATURE, known=True),
    "basis": Entry(meta(5, dtype=torch.bfloat16), "second_order", Place.MEASURED, derived=True),
    "own": Entry(meta(6), "momentum", Place.OWN),
}


# ---------------------------------------------------------------------- queries
@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (set(Place), ["second", "first", "number", "found", "known", "basis", "own"]),
        ({Place.ESTIMATE}, ["second", "first", "number"]),
        ({Place.CURVATURE, Place.MEASURED}, ["number", "found", "known", "basis"]),
        ({Place.MEASURED, Place.OWN}, ["number", "basis", "own"]),
        (set(), ["number"]),
    ],
)
def test_a_rank_holds_numbers_and_the_tensors_of_its_places(places: set[Place], expected: list[str]) -> None:
    found = held(SCHEMA, places)
    assert list(found) == expected
    assert all(found[key] is SCHEMA[key] for key in found)


def test_keys_of_a_place_are_sorted_and_without_numbers() -> None:
    for place, expected in {
        Place.ESTIMATE: ["first", "second"],
        Place.CURVATURE: ["found", "known"],
        Place.MEASURED: ["basis"],
        Place.EVERYWHERE: [],
        Place.OWN: ["own"],
    }.items():
        assert keys(SCHEMA, place) == keys(dict(reversed(SCHEMA.items())), place) == expected
    assert keys(SCHEMA, Place.CURVATURE, known=False) == ["found"]  # every holder finds "known" by itself
    assert keys(SCHEMA, Place.ESTIMATE, known=False) == ["first", "second"]


def test_kinds_have_keys_and_bytes() -> None:
    assert nbytes(SCHEMA) == {"factors": 44, "buffers": 4, "second_order": 42, "momentum": 24}
    assert nbytes({}) == {}
    assert kinds(SCHEMA) == ["factors", "buffers", "second_order", "momentum"]
    assert of_kinds(SCHEMA, "buffers", "momentum") == {"number", "known", "own"}
    assert of_kinds(SCHEMA, "window") == set()


def test_parts_of_a_window_are_known_by_their_plain_key() -> None:
    assert known(SCHEMA, "own@0of2") is known(SCHEMA, "own") is SCHEMA["own"]
    assert known(SCHEMA, "unknown") is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"none"}),
        ({"derived": True}, {"none", "factors"}),
        ({"optional": True}, {"none", "factors", "all"}),
        ({"always": True}, set()),
        ({"always": True, "derived": True}, set()),
    ],
)
def test_entries_that_a_checkpoint_may_lack(facts: dict[str, bool], expected: set[str]) -> None:
    entry = Entry(0, "buffers", Place.OWN, **facts)
    assert {kept for kept in ("all", "factors", "none") if entry.may_lack(kept)} == expected


def test_a_schema_is_a_catalog_with_shapes() -> None:
    catalog = {"a": ESTIMATE, "b": FOUND, "c": COUNTER}
    found = shaped(catalog, {"c": 3, "a": meta(2, 2)}, ["a"])
    assert list(found) == ["c", "a"]
    assert found["c"] == COUNTER._replace(like=3)
    assert (found["a"].kind, found["a"].place, found["a"].symmetric) == ("factors", Place.ESTIMATE, True)
    assert (found["a"].shape, found["c"].shape, found["c"].nbytes) == ((2, 2), None, 0)
    assert likes(found).keys() == found.keys()
    assert tensors(found).keys() == {"a"}
    with pytest.raises(KeyError):
        shaped(catalog, {"unknown": 0})


# ---------------------------------------------------------------------- schemas of methods
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


def test_a_block_without_one_of_its_methods_cannot_be_created() -> None:
    class Unfinished(Block):
        def schema(self, group: Any, held: Any) -> Any:
            return {}

    with pytest.raises(TypeError, match="abstract"):
        Unfinished(*[None] * 6)  # type: ignore[abstract, arg-type]
