"""Small blocks of equal shape precondition together and take the same steps as one by one."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from secondorder import EKFAC, KFAC, InverseOptions
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.preconditioners import block_stacks, directions
from secondorder.preconditioners.block_stacks import Limits, Stacked, directions_of_stacks
from secondorder.preconditioners.kronecker import KroneckerPreconditioner
from tests.support.building import built
from tests.support.device import SimulatedDevice
from tests.support.device_runs import DeviceRun, check, host
from tests.support.grid import each
from tests.support.tasks import Task

STEPS = 4


@pytest.fixture(autouse=True)
def stacks_of_any_size(monkeypatch):
    monkeypatch.setattr(block_stacks, "_FEW", 1)


class Net(nn.Module):
    """Layers with all kinds of matrices: with and without a bias, partly frozen, convolutions, an embedding, norms."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 12)
        self.convs = nn.Sequential(nn.Conv1d(12, 12, 1), nn.Tanh(), nn.Conv1d(12, 12, 1), nn.Tanh())
        self.grouped = nn.Sequential(nn.Conv1d(12, 12, 1, groups=3), nn.Conv1d(12, 12, 1, groups=3))
        self.norm = nn.Sequential(nn.LayerNorm(12), nn.LayerNorm(12))
        self.plain = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(12, 12), nn.Tanh())))
        self.bare = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 12, bias=False))
        self.biased = nn.Linear(12, 12)
        self.biased.weight.requires_grad_(False)
        self.wide = nn.Sequential(nn.Linear(12, 130), nn.Linear(130, 600))

    def forward(self, x):
        x = self.grouped(self.convs(self.words(x).mT)).mT
        return self.wide(self.biased(self.bare(self.plain(self.norm(x)))))


def optimizer_of(model, method, *, groups=False, **options):
    """An optimizer that refreshes every second step; ``groups`` give a plain layer a damping of its own."""
    params = model
    if groups:
        first = list(model.plain[0].parameters())
        rest = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in first)]
        params = [{"params": first, "damping": 0.5}, {"params": rest}]
        options["module"] = model
    return built(method, params, **{"factor_update_steps": 1, "inv_update_steps": 2, "lr": 0.001, **options})


def trained(monkeypatch, method, dtype, *, stacked, **options):
    """The parameters after some steps, and how many blocks the last one stacked, which may be none."""
    torch.manual_seed(0)
    model, sizes = Net().to(dtype), []

    def counted(*given):
        found = directions_of_stacks(*given) if stacked or len(sizes) < STEPS - 1 else Stacked({}, {})
        sizes.append(len(found.directions))
        return found

    monkeypatch.setattr(directions, "directions_of_stacks", counted)
    optimizer = optimizer_of(model, method, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(9, (6, 4), generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sizes[-1]


CASES = {
    "eigen": (KFAC, {}),
    "pi": (KFAC, {"damping_split": "pi"}),
    "truncated": (KFAC, {"inverse_method": InverseOptions(rank=1)}),
    "cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "power": (KFAC, {"power": 0.5}),
    "absolute": (KFAC, {"damping": 0.1, "weight_decay": 0.1, "weight_decay_in_curvature": True}),
    "bfloat16": (KFAC, {"inv_dtype": torch.bfloat16}),
    "diagonal": (KFAC, {"max_factor_dim": 12}),
    "grafted": (KFAC, {"graft": "adamw"}),
    "groups": (KFAC, {"groups": True}),
    "intra": (EKFAC, {}),
    "whitened": (EKFAC, {"power": 0.5, "graft": "adam"}),
}


@each(dtype=[torch.float64, torch.float32], case=CASES.keys())
def test_steps_are_those_of_single_products(monkeypatch, case, dtype):
    """Up to the rounding of products, which have the same bits except for the smallest matrices and for vectors."""
    method, options = CASES[case]
    if case == "eigen":  # whatever the bound of a stack is
        monkeypatch.setattr(block_stacks, "_HOST", Limits(2**16, 2**15, 400))
    together, count = trained(monkeypatch, method, dtype, stacked=True, **options)
    apart, none = trained(monkeypatch, method, dtype, stacked=False, **options)
    # All except the widest layer: an embedding, four convolutions, two norms, four layers, two without bias, a bias.
    assert (count, none) == (14, 0)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(together, apart, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "options", "few", "number"),
    [
        (EKFAC, {"estimator": "running"}, 1, 0),
        (EKFAC, {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "kl_clip": None}, 1, 0),
        (KFAC, {"orthogonalize": True}, 1, 4),  # the embedding, the norms and the bias, which have no polar factor
        (KFAC, {}, 3, 3),  # the layers of the only shape that more than three have
    ],
    ids=["running", "like Adam", "orthogonal", "few of a shape"],
)
def test_running_scales_orthogonalized_layers_and_few_blocks_are_not_stacked(monkeypatch, method, options, few, number):
    monkeypatch.setattr(block_stacks, "_FEW", few)
    assert trained(monkeypatch, method, torch.float32, stacked=True, **options)[1] == number


def test_blocks_without_a_gradient_are_left_out():
    model = Net()
    optimizer = KFAC(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)
    model(torch.randint(9, (6, 4))).square().mean().backward()
    optimizer.step()
    blocks = optimizer.preconditioner.plan.blocks
    source = {p: torch.ones_like(p) for p in model.plain[0].parameters()}
    found = directions_of_stacks(blocks, source, optimizer.preconditioner.stack_rule, lambda _: True)
    (index,) = found.directions
    assert blocks[index].name == "plain.0"


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_stacks_are_kept_until_curvature_changes(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = method(model, lr=0.0, damping=1e-3, factor_update_steps=4, inv_update_steps=4)
    first = model[0].weight

    def step():
        optimizer.zero_grad()
        model(torch.randn(9, 6, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        with optimizer.keep_directions() as kept:
            optimizer.step()
        return kept["0.weight"].clone(), dict(optimizer.preconditioner.runtime.stacks._kept)

    def are_same(found, others):
        return [found[name][-1] is others[name][-1] for name in found if "basis" in name[1]]

    before, stacks = step()
    assert optimizer.memory_usage()["workspace"] >= sum(stack.nbytes for *_, stack in stacks.values()) > 0
    again, same = step()
    assert torch.equal(before, again) == (method is KFAC)  # EKFAC measures its scale in each step
    assert are_same(stacks, same) == [True, True]
    saved = optimizer.state_dict()
    with torch.no_grad():
        optimizer.state[first]["basis_a"].mul_(2.0)
    other, changed = step()
    assert not torch.allclose(other, before)
    assert are_same(stacks, changed) == [False, True]
    optimizer.state[first]["basis_g"].data.mul_(2.0)  # as by communication, which torch's version counter misses
    optimizer.state[first]["refreshes"] += 1
    assert are_same(changed, step()[1]) == [False, False]
    optimizer.load_state_dict(saved)
    assert not torch.allclose(step()[0], other)


# ---------------------------------------------------------------- devices, where blocks of nearly any size are stacked


def net_for_more_data_than_features():
    """Rounding alone would determine the bases of large null spaces."""
    model = Net()
    model.words, model.wide = nn.Embedding(40, 12), nn.Linear(12, 10)
    return model


def tokens(generator):
    return torch.randint(40, (32, 8), generator=generator), torch.randint(10, (32, 8), generator=generator)


def rows(generator):
    return torch.randn(16, 8, generator=generator, dtype=torch.float64), torch.randint(8, (16,), generator=generator)


def deep(layers):
    """A task for a number of equal layers."""

    def build():
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))

    return Task(f"{layers} layers", build, rows)


NET = Task("net", net_for_more_data_than_features, tokens)

FURTHER = {
    "running": (EKFAC, {"estimator": "running"}),
    "like Adam": (EKFAC, {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "kl_clip": None}),
    "nesterov": (EKFAC, {"estimator": "running", "momentum_mode": "pre", "nesterov": True, "kl_clip": None}),
    "recomputed": (EKFAC, {"transport": "recompute"}),
    "orthogonal": (KFAC, {"orthogonalize": True}),
    "orthogonal alone": (KFAC, {"orthogonalize": True, "inv_update_steps": 0}),
    "coupled decay": (KFAC, {"weight_decay": 0.1, "nesterov": True}),
}


@pytest.mark.parametrize("case", {**CASES, **FURTHER})
def test_stacks_on_a_device_train_as_single_blocks_on_the_cpu(monkeypatch, case):
    method, options = {**CASES, **FURTHER}[case]
    seen = []

    def counted(*given):
        seen.append(directions_of_stacks(*given))
        return seen[-1]

    monkeypatch.setattr(directions, "directions_of_stacks", counted)
    check(lambda model: optimizer_of(model, method, **options), NET, steps=4)
    # The run on the CPU comes first.
    assert len(seen[-1].directions) >= max(len(seen[0].directions), 6)
    assert seen[-1].products
    assert not seen[0].products


@pytest.mark.parametrize(
    "case", ["eigen", "cholesky with decay", "running", "like Adam", "orthogonal", "orthogonal alone"]
)
def test_a_step_on_a_device_launches_as_many_kernels_for_eight_layers_as_for_four(case):
    """Statistics apart, which a step with an interval of ten does not capture."""
    decayed = {"cholesky with decay": (KFAC, {"inverse_method": "cholesky", "weight_decay": 0.1})}
    method, options = {**CASES, **FURTHER, **decayed}[case]
    rarely = {"factor_update_steps": 10, "inv_update_steps": 10, "refresh_warmup": False}
    taken = []
    for layers in (4, 8):
        with SimulatedDevice() as device:
            build = partial(optimizer_of, method=method, **rarely | options)
            run = DeviceRun(build, deep(layers), device).steps(3)
            for p in run.model.parameters():
                p.grad = device.tensor(torch.ones(p.shape, dtype=p.dtype))
            before = device.calls
            run.optimizer.step()
            taken.append(device.calls - before)
    assert taken[0] == taken[1] < 130


def test_states_on_a_device_are_views_of_stacks_and_take_no_more_memory():
    with SimulatedDevice() as device:
        run = DeviceRun(partial(optimizer_of, method=KFAC, inv_update_steps=1), NET, device)
        before = run.optimizer.memory_usage()
        run.steps(2)
        stacks = run.optimizer.preconditioner.runtime.stacks
        states = [run.optimizer.state[layer.weight] for layer in run.model.plain if isinstance(layer, nn.Linear)]
        places = [state["basis_a"].held.data_ptr() for state in states]
        stack = next(s for _, s in stacks._shared.values() if s.held.data_ptr() == places[0])
        assert torch.equal(stack.held[1], states[1]["basis_a"].held)
        states[1]["basis_a"].zero_()
        assert not stack.held[1].any()
        assert run.optimizer.memory_usage()["second_order"] == before["second_order"]
        assert stacks.nbytes == 0


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_one_block_of_a_stack_that_is_not_finite_gets_its_gradient(clip):
    """The others get the directions that they get on the CPU, and so does the clip of their length."""
    options = {"inverse_method": "cholesky", "factor_update_steps": 10, "inv_update_steps": 10, "momentum": 0.0}
    found = []
    for kind in (None, SimulatedDevice):
        with kind() if kind else nullcontext() as device:
            run = DeviceRun(lambda model: KFAC(model, lr=1.0, kl_clip=clip, **options), deep(4), device).steps(2)
            layer = run.model[2]
            run.optimizer.state[layer.weight]["inverse_g"].fill_(torch.inf)
            before = run.parameters()
            with run.optimizer.keep_directions() as kept:
                run.steps(1, start=2)
            moves = [p - q for p, q in zip(run.parameters(), before, strict=True)]
            assert all(torch.isfinite(move).all() for move in moves)
            gradient, direction = host(layer.weight.grad), host(kept["2.weight"])
            torch.testing.assert_close(direction / direction.norm(), gradient / gradient.norm())
            found.append(moves)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("method", "options"), [(KFAC, {}), (EKFAC, {}), (EKFAC, {"estimator": "running"})])
def test_statistics_of_one_block_of_a_stack_that_are_not_finite_are_skipped(method, options):
    with SimulatedDevice() as device:
        build = partial(optimizer_of, method=method, inv_update_steps=4, **options)
        run = DeviceRun(build, deep(4), device).steps(2)
        states = [run.optimizer.state[run.model[i].weight] for i in (0, 2)]
        before = [{key: host(s[key]).clone() for key in ("factor_a", "factor_g", "factor_weight")} for s in states]
        hook = run.model[2].register_forward_pre_hook(lambda _, args: (args[0] * torch.inf * 0,))
        run.steps(1, start=2)  # its input is NaN, and so are all gradients
        hook.remove()
        for state, known in zip(states, before, strict=True):
            assert all(torch.equal(host(state[key]), x) for key, x in known.items())
        run.steps(2, start=3)
        assert all(torch.isfinite(p).all() for p in run.parameters())


def halves(model, method, first, rest):
    """An optimizer with a group for each half of the model of a deep task, which has four layers."""
    parts = [model[0:3].parameters(), model[4:].parameters()]
    groups = [{"params": [*part]} | own for part, own in zip(parts, (first, rest), strict=True)]
    return method(groups, module=model, lr=0.1, factor_update_steps=1, inv_update_steps=2)


CHOLESKY, EIGEN = {"inverse_method": "cholesky"}, {"inverse_method": "eigen"}
GROUPED = {
    "unclipped": (KFAC, {"kl_clip": None}, {}),
    "grafted": (KFAC, {"graft": "sgd"}, {}),
    "orthogonal": (KFAC, {"orthogonalize": True}, {}),
    "transport": (EKFAC, {"transport": "kfac"}, {}),
    "rate": (KFAC, {"lr": 0.3}, {}),
    "damping": (EKFAC, {"damping": 0.5}, {}),
    "factored": (KFAC, CHOLESKY, {**EIGEN, "damping": 0.3}),
}


@pytest.mark.parametrize("case", GROUPED)
def test_groups_with_other_options_are_not_mixed_up(case):
    """Also if as many parameters are clipped as there are blocks."""
    method, first, rest = GROUPED[case]
    check(lambda model: halves(model, method, first, rest), deep(4), steps=5)


def test_a_rank_does_not_hide_how_the_damping_is_split(monkeypatch):
    found = []
    for few in (2, 100):
        monkeypatch.setattr(block_stacks, "_FEW", few)
        ranks = [{**own, "inverse_rank": 2} for own in (CHOLESKY, EIGEN)]
        found.append(DeviceRun(lambda model, own=ranks: halves(model, KFAC, *own), deep(4)).steps(4).parameters())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", [{}, {"estimator": "running"}, {"transport": "recompute"}], ids=str)
def test_stacks_are_made_once(options):
    with SimulatedDevice() as device:
        run = DeviceRun(partial(optimizer_of, method=EKFAC, inv_update_steps=3, **options), deep(4), device)
        run.steps(4)
        stacks = run.optimizer.preconditioner.runtime.stacks._shared
        before = {name: stack for name, (_, stack) in stacks.items()}
        run.steps(3, start=4)
        assert [name for name, (_, stack) in stacks.items() if stack is not before.get(name)] == []


class Sometimes(nn.Module):
    """Equal layers, half of which run in a pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        for i in torch.randperm(6, generator=torch.Generator().manual_seed(self.passes))[:3].sort().values:
            x = x + torch.tanh(self.layers[int(i)](x))
        return x


TURNS = Task("turns", Sometimes, rows)


@pytest.mark.parametrize(("method", "options"), [(KFAC, {}), (EKFAC, {}), (EKFAC, {"estimator": "running"})])
def test_layers_that_take_turns_use_no_further_memory(method, options):
    build = partial(optimizer_of, method=method, lr=0.01, **options)
    with SimulatedDevice() as device:
        run = DeviceRun(build, TURNS, device).steps(12)
        found = run.parameters()
        stacks = run.optimizer.preconditioner.runtime.stacks
        shared = sum(stack.nbytes for _, stack in stacks._shared.values())
        usage = run.optimizer.memory_usage()
        assert shared <= sum(usage[kind] for kind in ("factors", "second_order", "scale", "buffers") if kind in usage)
        assert len(run.optimizer.preconditioner.exchange._skipped) <= 64 + 6
    torch.testing.assert_close(found, DeviceRun(build, TURNS).steps(12).parameters(), rtol=1e-6, atol=1e-7)


def test_a_block_of_another_class_folds_its_factors_itself():
    class Doubled(KroneckerBlock):
        def fold_factors(self, measured, gate):
            part = measured.parts["factor_a"]
            parts = {**measured.parts, "factor_a": part._replace(total=2 * part.total)}
            return super().fold_factors(measured._replace(parts=parts), gate)

    class Preconditioner(KroneckerPreconditioner):
        block_type = Doubled

    class Method(KFAC):
        preconditioner_type = Preconditioner

    check(partial(optimizer_of, method=Method), deep(4), steps=4)


def test_a_dropped_step_does_not_count_as_skipped_statistics():
    with SimulatedDevice() as device:
        run = DeviceRun(lambda model: EKFAC(model, lr=0.01, estimator="running"), deep(4), device).steps(2)
        for p in run.model.parameters():
            p.grad = device.tensor(torch.full(p.shape, torch.nan, dtype=p.dtype))
        run.optimizer.step()
        assert run.optimizer.diagnostics()["skipped_statistics"] == 0
        assert run.optimizer.diagnostics()["skipped_steps"] == 1


def test_a_loaded_state_replaces_the_stacks():
    with SimulatedDevice() as device:
        build = partial(optimizer_of, method=KFAC, inv_update_steps=1)
        runs = [DeviceRun(build, NET, device).steps(steps) for steps in (2, 1)]
        runs[1].model.load_state_dict(runs[0].model.state_dict())
        runs[1].optimizer.load_state_dict(runs[0].optimizer.state_dict())
        first, second = (run.steps(2, start=2).parameters() for run in runs)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
