"""Costs of methods, estimated on the ``meta`` device, against optimizers that were built and took a step."""

import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import secondorder
from benchmarks.commands.scaling import DecoderLayer
from secondorder import KFAC, InverseOptions, RefreshOptions
from secondorder.__main__ import load_target, main, parse_input
from secondorder.plan.rates import at
from secondorder.plan.tally import MODEL, Tally

ROOT = Path(__file__).resolve().parent.parent.parent
METHODS = ["KFAC", "EKFAC", "HyLo", "MFAC", "SparseMFAC", "GGT"]
RATES = secondorder.MachineRates(
    device="cpu", operator=1e-5, bandwidth=((2**16, 1e10), (2**26, 1e10)), strided=((1, 1e9), (32, 1e10)),
    scattered=2e9, matmul=((1, 1e10), (512, 1e11)), conv=((4, 1e10), (64, 1e11)), eigh=((16, 1e-5), (512, 1e-2)),
    cholesky=((16, 1e-5), (512, 1e-3)),
)  # fmt: skip


def decoder(tokens: int, width: int, hidden: int, heads: int, layers: int) -> nn.Module:
    """A decoder with the structure of Llama."""
    blocks = [DecoderLayer(width, heads, hidden) for _ in range(layers)]
    head = nn.RMSNorm(width), nn.Linear(width, tokens, bias=False)
    return nn.Sequential(nn.Embedding(tokens, width), *blocks, *head)


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


CASES: dict[str, tuple[Any, Any]] = {
    "convolutional": (convolutional, lambda: torch.randn(16, 3, 12, 12)),
    "transformer": (lambda: decoder(40, 24, 48, 4, 2), lambda: torch.randint(40, (6, 10))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_that_of_a_built_optimizer_after_a_step(method: str, case: str) -> None:
    make, batch = CASES[case]
    torch.manual_seed(0)
    model, inputs = make(), batch()
    found = secondorder.estimate(model, inputs, methods=[method], rates=RATES).methods[method]
    with secondorder.create(method, model) as optimizer:
        model(inputs).square().mean().backward()
        optimizer.step()
        assert found.memory == optimizer.memory_usage()


def test_defaults_are_those_of_the_device() -> None:
    estimate = partial(secondorder.estimate, nn.Linear(2100, 2), batch_size=4, methods=["kfac"], rates=RATES)
    on_cpu, on_cuda = (estimate(device=device).methods["KFAC"].memory["factors"] for device in ("cpu", "cuda"))
    assert on_cpu < 4 * 2101 * 3
    assert on_cuda > 4 * 2101**2


def test_memory_of_first_order_optimizers_is_that_of_their_states() -> None:
    model = perceptron()
    numbers = sum(p.numel() for p in model.parameters())
    found = secondorder.estimate(model, batch_size=4, methods=["sgd", "adamw"], rates=RATES).methods
    assert found["SGD"].memory["total"] == 4 * numbers
    assert found["AdamW"].memory["total"] == 8 * numbers + 4 * 4


def test_flops_of_a_linear_layer_are_those_counted_by_hand() -> None:
    n, n_a, n_g = 32, 20, 10
    model = nn.Linear(n_a, n_g, bias=False)
    found = secondorder.estimate(model, batch_size=n, methods=["sgd", "kfac"], rates=RATES).methods
    forward_and_weight_gradient = 4 * n * n_a * n_g  # the inputs need no gradient
    assert found["SGD"].flops == {MODEL: forward_and_weight_gradient}
    kfac = found["KFAC"].flops
    assert kfac["capture"] == pytest.approx(2 * n * (n_a**2 + n_g**2) / 10)
    assert kfac["refresh"] == pytest.approx(9 * (n_a**3 + n_g**3) / 100, rel=0.2)  # including the check of the bases
    assert kfac["precondition"] == 4 * n_a * n_g * (n_a + n_g)
    assert found["KFAC"].flops_ratio == pytest.approx(sum(kfac.values()) / forward_and_weight_gradient)


def test_flops_are_those_of_a_step_on_the_cpu() -> None:
    """There are several algorithms for statistics of convolutions, and the estimate must use that of the device."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3))
    x, refresh = torch.randn(8, 16, 32, 32), RefreshOptions(warmup=False)
    build = partial(KFAC, factor_update_steps=1, inv_update_steps=50, refresh=refresh)
    flops = secondorder.estimate(model, x, methods={"it": build}, rates=RATES).methods["it"].flops
    tally = Tally()
    with build(model) as optimizer:
        optimizer.time_stages(tally)
        for _ in range(2):
            tally.take()
            with tally:
                model(x).square().mean().backward()
                optimizer.step()
    counted = {stage: sum(cost.flops * n for cost, n in own.items()) for stage, own in tally.take().items()}
    for stage in (MODEL, "capture", "precondition"):
        assert flops[stage] == pytest.approx(counted[stage])


def test_the_model_is_neither_changed_nor_run() -> None:
    model = convolutional().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    secondorder.estimate(model, torch.randn(4, 3, 12, 12), methods=["kfac"], rates=RATES)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_estimating_llama_with_seven_billion_parameters_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make = lambda: (decoder(32000, 4096, 11008, 32, 32), torch.zeros(1, 128, dtype=torch.int64))  # noqa: E731
    found = secondorder.estimate(make, methods=["kfac"], rates=RATES, device="cpu")
    assert found.parameters == 6_738_415_616
    kfac = found.methods["KFAC"]
    assert kfac.failure is None
    assert kfac.memory["momentum"] == 8 * found.parameters  # Adam's two moments, for the size of the steps
    assert kfac.flops[MODEL] > 6 * 128 * 6.4e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: 1 GiB; weights would need 25


def test_more_ranks_store_less_and_send_what_plan_counts() -> None:
    model, inputs = convolutional(), torch.randn(8, 3, 12, 12)
    estimate = partial(secondorder.estimate, model, inputs, methods=["kfac"], rates=RATES)
    alone, found = estimate().methods["KFAC"], estimate(world_size=4, comm="mem_opt")
    four = found.methods["KFAC"]
    ranks = KFAC(model).plan(world_size=4, comm=secondorder.MemOpt(), batch_size=8).ranks
    assert four.memory["second_order"] == max(rank.stored["second_order"] for rank in ranks)
    assert four.memory["second_order"] < alone.memory["second_order"]
    assert four.sent == max(sum(rank.sent.values()) for rank in ranks)
    assert alone.sent == 0
    assert "4 ranks, MemOpt()" in str(found)


def test_a_method_that_cannot_train_the_model_reports_the_reason() -> None:
    refuse = Mock(side_effect=ValueError("not this one"))
    found = secondorder.estimate(perceptron(), batch_size=4, methods={"mine": refuse}, rates=RATES)
    assert found.methods["mine"].failure == "not this one"
    assert "mine: not this one" in str(found)


@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, "unknown method 'adam'", {"methods": ["adam"]}),
        (TypeError, "list of names, got 'kfac'", {"methods": "kfac"}),
        (ValueError, "batch_size must be .* got 0", {"batch_size": 0}),
        (ValueError, "world_size must be .* got 0", {"world_size": 0}),
        (ValueError, "unknown strategy 'none_opt'", {"world_size": 2, "comm": "none_opt"}),
        (ValueError, "no parameters to train: ReLU", {"model_or_maker": nn.ReLU()}),
        (ValueError, "inputs of Conv2d are not known", {"model_or_maker": nn.Conv2d(3, 4, 3)}),
        (TypeError, "got 3", {"model_or_maker": 3}),
        (TypeError, "must return a torch.nn.Module", {"model_or_maker": lambda: 3}),
        (RuntimeError, "does not run on the meta device", {"inputs": torch.randn(4, 5)}),
        (TypeError, "rates must be a MachineRates, got 3", {"rates": 3}),
    ],
)
def test_invalid_arguments_are_refused(error: type[Exception], match: str, given: dict[str, Any]) -> None:
    arguments = {"model_or_maker": perceptron(), "batch_size": 4, "methods": ["sgd"], "rates": RATES, **given}
    with pytest.raises(error, match=match):
        secondorder.estimate(**arguments)


@pytest.mark.parametrize(
    ("parse", "text", "match"),
    [
        (load_target, "tests", "got 'tests'"),
        (load_target, "no_such:f", "cannot import 'no_such'"),
        (load_target, "json:f", "has no 'f'"),
        *((parse_input, text, f"got {text!r}") for text in ("", "3x", "axb", "3x0", "3:integer", "4x4:Tensor")),
    ],
)
def test_invalid_targets_and_shapes_are_refused(parse: Any, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse(text)


def test_rates_survive_a_file_and_are_checked(tmp_path: Path) -> None:
    RATES.save(tmp_path / "rates.json")
    assert secondorder.MachineRates.load(tmp_path / "rates.json") == RATES
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="does not contain the rates"):
        secondorder.MachineRates.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="operator must be > 0, got -1"):
        secondorder.MachineRates(**{**vars(RATES), "operator": -1})


def test_curves_are_interpolated_logarithmically() -> None:
    curve = ((1.0, 1.0), (100.0, 16.0))
    assert at(curve, 10) == pytest.approx(4.0)
    assert at(curve, 0.5) == 1.0
    assert at(curve, 200, power=3) == pytest.approx(128.0)


@pytest.mark.parametrize(
    ("order", "run"), [((0, 1, 2), 24), ((0, 2, 1), 1), ((1, 0, 2), 4)], ids=["same", "transposed", "rows"]
)
def test_the_cost_of_a_permuting_copy_depends_on_its_contiguous_runs(order: tuple[int, ...], run: int) -> None:
    x = torch.empty(2, 3, 4, device="meta").permute(order)
    with Tally() as tally:
        x.clone(memory_format=torch.contiguous_format)
        torch.empty(x.shape, device="meta").copy_(x)
    costs = {cost: number for cost, number in tally.take()[MODEL].items() if cost.kind == "strided"}
    assert [(cost.size, cost.nbytes) for cost in costs] == [(run, 2 * 4 * 24)]
    assert list(costs.values()) == [2]
    slow = RATES.seconds(costs) - 2 * RATES.operator
    assert slow == pytest.approx(2 * 192 / at(RATES.strided, run))


def test_equal_operators_are_counted_each_time() -> None:
    x = torch.ones(4, 3, device="meta")
    with Tally() as tally:
        for _ in range(3):
            x @ x.mT
            x.add_(1)
    counted = tally.take()[MODEL]
    assert sum(number for cost, number in counted.items() if cost.kind == "matmul") == 3
    assert sum(cost.flops * number for cost, number in counted.items()) == 3 * 2 * 4 * 3 * 4


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    RATES.save(tmp_path / "rates.json")
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(6, 3)\n")
    command = [sys.executable, "-m", "secondorder", "estimate", "mine:make", "--batch-size", "8"]
    options = ["--methods", "sgd", "kfac", "--rates", str(tmp_path / "rates.json")]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=True)
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:4]] == ["method", "SGD", "KFAC"]


def test_the_command_writes_json_and_reports_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    RATES.save(tmp_path / "rates.json")
    given = ["--rates", str(tmp_path / "rates.json"), "--methods", "sgd"]
    assert main(["estimate", "torch.nn:ReLU", "--input", "4x4", *given]) == 2
    assert "no parameters to train: ReLU" in capsys.readouterr().err
    target = f"{__name__}:perceptron"
    sys.modules.setdefault(__name__, sys.modules[perceptron.__module__])
    assert main(["estimate", target, "--input", "4x12", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 4


def network(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 3))


def estimated(width: int = 64, **keywords: Any) -> Any:
    methods = {"it": lambda model: KFAC(model, lr=0.01, graft="adamw", **keywords)}
    return secondorder.estimate(network(width), batch_size=32, methods=methods, rates=RATES).methods["it"]


def test_a_device_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = AssertionError("Torch not compiled with CUDA enabled")  # as torch raises without the device
    monkeypatch.setattr("secondorder.plan.estimate.measure_rates", Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"speed of 'cuda' cannot be measured .*device='cpu'"):
        secondorder.estimate(network(), batch_size=4, methods=["kfac"], device="cuda")


def test_estimates_and_plans_count_steps_that_are_not_preconditioned() -> None:
    every = {"factor_update_steps": 20, "inv_update_steps": 20}
    full, half = (estimated(**every, refresh=RefreshOptions(precondition_steps=k)).flops for k in (1, 2))
    assert half["precondition"] == pytest.approx(full["precondition"] / 2)
    assert half["refresh"] == pytest.approx(full["refresh"])
    optimizers = (KFAC(network(), graft="adamw", refresh=RefreshOptions(precondition_steps=k)) for k in (1, 2))
    full, half = (opt.plan(world_size=2, batch_size=8).ranks[0].flops["precondition"] for opt in optimizers)
    assert half == pytest.approx(full / 2)


def test_a_refresh_of_leading_eigenvectors_costs_products() -> None:
    """A factorization of ``[n, n]`` would be much more expensive than its products with a few vectors."""
    full = estimated(512, inverse_method="eigen").flops["refresh"]
    few = estimated(512, inverse_method=InverseOptions(rank=4)).flops["refresh"]
    assert few < full / 20


def test_the_estimate_shows_the_intervals_of_the_budget() -> None:
    small, large = (estimated(budget=limit) for limit in (1.1, 4.0))
    assert small.flops["precondition"] < large.flops["precondition"]
    assert small.slowdown < large.slowdown


def test_memory_of_a_preset_with_a_budget_is_exact() -> None:
    model = network(256)
    found = secondorder.estimate(model, batch_size=32, methods=["from_adamw"], rates=RATES).methods["from_adamw"]
    optimizer = secondorder.create("from_adamw", model)
    model(torch.randn(32, 40)).square().mean().backward()
    optimizer.step()
    differing = {key for key, _ in found.memory.items() ^ optimizer.memory_usage().items()}
    assert differing <= {"workspace", "total"}
