"""The command ``scaling``: its models, the formula of its times, and a run with a few ranks."""

import json

import pytest
import torch

from benchmarks.cli import main
from benchmarks.commands.scaling import STRATEGIES, Base, Scaling, architecture
from benchmarks.commands.window import count, shapes_of
from benchmarks.counting import factor_flops
from secondorder import KFAC, CommOpt, HybridOpt, MemOpt


def test_models_have_the_published_sizes():
    for name, millions in [
        ("resnet20", 0.270),
        ("resnet32", 0.464),
        ("bert-base", 109.5),
        ("bert-large", 335.1),
        ("decoder-7b", 6738.4),
    ]:
        found = architecture(name)
        assert sum(p.numel() for p in found.model.parameters()) == pytest.approx(1e6 * millions, rel=2e-3)
        assert {p.device.type for p in found.model.parameters()} == {"meta"}


def test_resnet50_has_the_shapes_of_the_window_benchmark():
    shapes = [tuple(p.shape) for p in architecture("resnet50").model.parameters()]
    assert sorted(shapes) == sorted(shapes_of("resnet50"))
    assert count(shapes) == 25_557_032


def test_statistics_contain_every_position():
    found = architecture("resnet50")
    one, two = (factor_flops(found.model, lambda n=n: found.model(found.inputs(n))) for n in (1, 2))
    assert two == 2 * one
    stem, head = 2 * 112 * 112 * (147**2 + 64**2), 2 * (2049**2 + 1000**2)
    assert one > stem + head


def model_of(**settings):
    return Scaling(link_gbps=8.0, node_gbps=80.0, latency_us=0.0, gpu_tflops=1.0, refresh_tflops=0.5, **settings)


def seconds(comm, world, base=None):
    network = torch.nn.Sequential(torch.nn.Linear(15, 32), torch.nn.Linear(31, 8))
    optimizer = KFAC(network)
    plan = optimizer.plan(world, comm)
    return plan, model_of()._seconds(comm, plan, base or Base(10**9, 10**6, 10**8), optimizer)


def test_seconds_by_hand():
    """Two ranks are in one node, at 10 GB/s, and 16 ranks in two nodes, at 1 GB/s."""
    plan, found = seconds(CommOpt(), 2)
    assert found["training"] == 1e-3
    assert found["gradients"] == 1e6 / 1e10  # 2 (W - 1) / W is 1
    assert found["statistics"] == pytest.approx(1e8 / 10 / 1e12)
    assert found["refresh"] == max(rank.flops["refresh"] for rank in plan.ranks) / 0.5e12
    assert found["precondition"] == plan.ranks[0].flops["precondition"] / 1e12
    assert found["messages"] == pytest.approx(sum(plan.ranks[0].wire.values()) / 1e10)
    plan, found = seconds(CommOpt(), 16)
    assert found["gradients"] == 2 * 15 / 16 * 1e6 / 1e9
    assert found["messages"] == pytest.approx(sum(plan.ranks[0].wire.values()) / 1e9)


def test_directions_of_hybrid_opt_stay_within_a_node():
    plan, hybrid = seconds(HybridOpt(1 / 8), 16)
    wire = plan.ranks[0].wire
    outside = sum(n for stage, n in wire.items() if stage != "directions")
    assert hybrid["messages"] == pytest.approx(wire["directions"] / 1e10 + outside / 1e9)
    _, spread = seconds(MemOpt(), 16)
    assert spread["messages"] > hybrid["messages"]


@pytest.mark.parametrize("method", ["kfac", "kfac-cholesky", "ekfac-running", "mfac"])
def test_the_command(method, tmp_path, capsys):
    words = ["scale", "plan", "--model", "resnet20", "--method", method, "--worlds", "1", "2", "16"]
    assert main([*words, "--out-dir", str(tmp_path)]) == 0
    stem = f"scaling-resnet20-{method}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.{suffix}" for suffix in ("json", "txt", "svg")}
    found = json.loads((tmp_path / f"{stem}.json").read_text())["results"]
    names = list(STRATEGIES)[: 3 if method == "mfac" else 4]
    assert [(row["strategy"], row["world"]) for row in found] == [(name, w) for name in names for w in (1, 2, 16)]
    one, *_ = found
    assert one["sent"] == 0
    by_name = {(row["strategy"], row["world"]): row for row in found}
    assert by_name["MemOpt", 16]["curvature_mean"] < by_name["CommOpt", 16]["curvature_mean"] / 8
    text = capsys.readouterr().out
    assert "Times are modeled, not measured" in " ".join(text.split())


def test_pictures_of_equal_figures_are_equal(tmp_path):
    words = ["scale", "plan", "--model", "resnet20", "--worlds", "1", "4", "--out-dir"]
    pictures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        main([*words, str(folder)])
        pictures.append((folder / "scaling-resnet20-kfac.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_values_that_are_refused(capsys):
    for words, message in [
        (["--worlds", "0"], "worlds must be positive, got (0,)"),
        (["--link-gbps", "0"], "link_gbps must be positive, got 0.0"),
        (["--batch-size", "0"], "batch_size must be positive, got 0"),
    ]:
        assert main(["scale", "plan", "--model", "resnet20", *words]) == 2
        assert message in capsys.readouterr().err
