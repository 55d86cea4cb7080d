"""The command ``window``: shapes, bytes by hand, full windows, and a run at tiny size."""

import pytest
import torch
from torch import nn

from benchmarks.commands.window import ANYWHERE, STORAGES, count, shapes_of
from benchmarks.filling import dense_rows, fill_windows
from benchmarks.recipes.building import window_keywords
from secondorder import MFAC, LowRank, SparseMFAC, TopK
from tests.support.building import built
from tests.support.grid import each
from tests.support.window import gram, ring

SHAPES = [(100, 50), (3,), (700,), (8, 4, 3, 3), (512,)]


@pytest.mark.parametrize("size", ["autoencoder", "large", "resnet50"])
def test_a_sparse_window_is_as_small_as_documented(size):
    shapes, rows = shapes_of(size), 1024
    for storage, at_least in (("topk", 60), ("topk-bf16", 90), ("topk-bf16-4bit", 95)):
        params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        held = built(MFAC, params, window_size=rows, **window_keywords(STORAGES[storage])).memory_usage()
        assert 4 * rows * count(shapes) >= at_least * (held["window"] + held["error"] + held["gram"])


def test_window_keywords():
    assert window_keywords({"lr": 1.0, "window_size": 3}) == {"lr": 1.0, "window_size": 3}
    assert window_keywords({"window_dtype": "bfloat16"}) == {"window_dtype": torch.bfloat16}
    assert window_keywords({"rank": 3}) == {"compression": LowRank(3)}
    assert window_keywords({"beta2": 0.9}) == {"betas": (0.0, 0.9)}
    plain = {"density": 0.1, "block_size": 64, "value_dtype": "bfloat16", "error_bits": 4}
    expected = TopK(density=0.1, block_size=64, value_dtype=torch.bfloat16, error_bits=4)
    assert window_keywords({**plain, "lr": 1.0}) == {"compression": expected, "lr": 1.0}
    for bad, message in (
        ({"rank": 2, "block_size": 64}, "rank=2 asks for LowRank and block_size for TopK"),
        ({"window_dtype": "bf16"}, "window_dtype must be the name of a dtype, such as bfloat16, got 'bf16'"),
        ({"value_dtype": "nn"}, "value_dtype must be"),
    ):
        with pytest.raises(ValueError, match=message):
            window_keywords(bad)


STORED = {
    "dense": {},
    "bfloat16": {"window_dtype": torch.bfloat16},
    "topk": {"compression": TopK(density=0.1, block_size=512)},
    "topk without feedback": {"compression": TopK(density=0.1, block_size=512, error_feedback=False)},
    "topk 4 bits": {"compression": TopK(density=0.1, block_size=512, value_dtype=torch.bfloat16, error_bits=4)},
    "topk of all": {"compression": TopK(density=1.0, block_size=512)},
    "lowrank": {"compression": LowRank(2)},
}


@each(storage={name.replace(" ", "_"): name for name in STORED}, partition=["global", "layer"])
def test_steps_use_a_filled_window(storage, partition):
    """The next step writes row 0 of the Gram matrix, which must contain the dot products with the random rows."""
    rows = 6
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = built(MFAC, params, window_size=rows, partition=partition, **STORED[storage])
    assert fill_windows(optimizer) == rows
    for p in params:
        p.grad = torch.randn_like(p) / count(SHAPES) ** 0.5
    optimizer.step()
    state = optimizer.state_dict()["state"]
    units = [range(len(SHAPES))] if partition == "global" else [[i] for i in range(len(SHAPES))]
    for unit in units:
        found = ring(optimizer, params, unit, 512)
        stored, kept = found @ found.T, gram(state[unit[0]])
        torch.testing.assert_close(kept[0], stored[0], rtol=1e-4, atol=1e-6)
        assert int(state[unit[0]]["count"]) == rows + 1
        assert int(state[unit[0]]["pos"]) == 1
        if partition == "global":
            assert 0.5 < stored.diagonal()[1:].mean() < 2
    for i in range(len(SHAPES)):
        for key in ("window_idx", "tail_idx"):
            if key in state[i]:
                assert (state[i][key].diff(dim=-1) > 0).all()


def test_an_optimizer_without_a_window_cannot_be_filled():
    with pytest.raises(ValueError, match="SGD has no window"):
        fill_windows(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))


def test_dense_rows_are_the_window_itself():
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = MFAC(params, window_size=4)
    fill_windows(optimizer)
    rows = dense_rows(optimizer)
    assert rows.shape == (4, count(SHAPES))
    windows = [optimizer.state[p]["window"] for p in params]
    assert rows.data_ptr() == min(window.data_ptr() for window in windows)
    assert rows.double().square().sum() == pytest.approx(sum(w.double().square().sum() for w in windows))
    assert dense_rows(SparseMFAC(params, window_size=4)) is None


@pytest.mark.usefixtures("known_machine")
def test_window_command(run, capsys):
    results = run("measure window --sizes digits --window-size 16 --steps 3 --threads 1")["window"]["results"]
    printed = capsys.readouterr().out
    assert [result["storage"] for result in results] == list(ANYWHERE)
    for result in results:
        assert result["storage"] in printed
        assert {len(times) for times in result["times"].values()} == {3}
        assert min(result["step"], result["floor"], result["peak_bytes"]) > 0
        assert result["ratio"] == pytest.approx(result["step"] / result["floor"])
        assert ("pair" in result) == result["storage"].startswith("dense")
    assert results[0]["dense_over_state"] == pytest.approx(1, abs=0.01)
