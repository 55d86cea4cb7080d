"""The command ``scaling``: its models, the formula of its times, and a run with a few ranks."""

import pytest
import torch

from benchmarks.commands.scaling import STRATEGIES, Base, Scaling, architecture
from benchmarks.commands.window import count, shapes_of
from benchmarks.counting import factor_flops
from secondorder import KFAC, CommOpt, HybridOpt, MemOpt


def test_models_have_the_published_sizes():
    sizes = {"resnet20": 0.270, "resnet32": 0.464, "bert-base": 109.5, "bert-large": 335.1, "decoder-7b": 6738.4}
    for name, millions in sizes.items():
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


@pytest.mark.parametrize("method", ["kfac", "ekfac-running", "mfac"])
def test_the_command(method, run, tmp_path, capsys):
    stem, more = f"scaling-resnet20-{method}", "--dp-kfac" if method == "kfac" else ""
    words = f"scale plan --model resnet20 --method {method} --worlds 1 2 16 {more}"
    found = run(words)[stem]["results"]
    assert "Times are modeled, not measured" in " ".join(capsys.readouterr().out.split())
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.{suffix}" for suffix in ("json", "txt", "svg")}
    names = [*list(STRATEGIES)[: 3 if method == "mfac" else 4], *(["DP-KFAC"] if more else [])]
    assert [(row["strategy"], row["world"]) for row in found] == [(name, w) for name in names for w in (1, 2, 16)]
    assert found[0]["sent"] == 0
    rows = {(row["strategy"], row["world"]): row for row in found}
    assert rows["MemOpt", 16]["curvature_mean"] < rows["CommOpt", 16]["curvature_mean"] / 8
    if more:
        own, usual = rows["DP-KFAC", 16], rows["MemOpt", 16]
        assert own["seconds"]["statistics"] < usual["seconds"]["statistics"]
        assert own["sent"] < usual["sent"]
        picture = (tmp_path / f"{stem}.svg").read_bytes()
        run(words)
        assert (tmp_path / f"{stem}.svg").read_bytes() == picture  # equal figures


def test_values_that_are_refused(run):
    for words, message in [
        ("--worlds 0", "worlds must be positive, got (0,)"),
        ("--link-gbps 0", "link_gbps must be positive, got 0.0"),
        ("--batch-size 0", "batch_size must be positive, got 0"),
        ("--dp-kfac --method hylo", "dp_kfac is a way to take the factors"),
    ]:
        run(f"scale plan --model resnet20 {words}", error=message)


@pytest.mark.slow
def test_mem_opt_divides_the_curvature_among_real_ranks(run):
    found = run("scale ranks --world 2 --batch 2 --steps 2 --factor-steps 1 --strategies comm_opt mem_opt")
    everyone, owner = ([rank[0] for rank in entry["ranks"]] for entry in found["ranks"]["results"])
    assert everyone[0] == everyone[1]
    assert sum(owner) == everyone[0]  # every layer is on exactly one rank
    assert max(owner) <= 1.15 / 2 * everyone[0]
    sent = [[rank[1] for rank in entry["ranks"]] for entry in found["ranks"]["results"]]
    assert all(n > 0 for ranks in sent for n in ranks)
