"""HyLo where layers thaw, batches differ, options change, policies answer and checkpoints go from one to another."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import HyLo, ParamScheduler
from secondorder.diagnostics import Analysis, read_events
from secondorder.linalg import selection, stacks, woodbury
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError, SwitchPolicy
from tests.support.kfac import assert_close, labels, noise
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.hylo import (
    LATER,
    as_rows,
    error,
    example_gradients,
    flat,
    gradients,
    greedy,
    one,
    plain_hylo,
    sngd,
    step,
    with_gradient,
)

MODES = ("auto", "kid", "kis", "sngd")


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().flatten(1).sum(1).mean()


def targets(n: int = 12, d: int = 4, d_out: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(n, d, seed=seed), noise(n, d_out, seed=seed + 50)


def train(opt: HyLo, model: nn.Module, begin: int, end: int, n: int = 12) -> None:
    for seed in range(begin, end):
        step(opt, model, *vectors(n, seed=seed), F.cross_entropy)


def two_groups(model: nn.Module, first: dict, second: dict, **keywords) -> HyLo:
    groups = [
        {"params": list(model[0].parameters()), **first},
        {"params": list(model[2].parameters()), **second},
    ]
    return plain_hylo(groups, module=model, **keywords)


def tensors_of(opt: HyLo) -> dict[str, Tensor]:
    """Copies of all tensors of the state, under the names of parameters and keys."""
    held = {(name, key): value for name, block in opt.blocks.items() for key, value in opt.state[block.owner].items()}
    return {f"{name}.{key}": value.clone() for (name, key), value in held.items() if isinstance(value, Tensor)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


def assert_goes_on(opt: HyLo, model: nn.Module, second: HyLo, other: nn.Module, steps: int = 6) -> None:
    """Two optimizers on equal models do the same, to the bit."""
    other.load_state_dict(model.state_dict())
    for o, m in ((opt, model), (second, other)):
        train(o, m, 100, 100 + steps)
    assert torch.equal(flat(dict(other.named_parameters())), flat(dict(model.named_parameters())))
    assert opt.diagnostics()["mode"] == second.diagnostics()["mode"]
    assert_same(tensors_of(second), tensors_of(opt))


# ---------------------------------------------------------------------------------------------------------------------
# A bias that thaws
# ---------------------------------------------------------------------------------------------------------------------

THAWING = {
    "linear": (lambda: nn.Linear(4, 3), (16, 4), (16, 3)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (16, 3, 5, 5), (16, 8, 3, 3)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (16, 4, 5, 5), (16, 8, 3, 3)),
    "one input": (lambda: nn.Linear(1, 3), (16, 6, 1), (16, 6, 3)),
    "norm of two": (lambda: nn.LayerNorm(2), (16, 6, 2), (16, 6, 2)),
}


@pytest.mark.parametrize("approx", ["reduce", "expand"])
@pytest.mark.parametrize("kind", THAWING)
def test_rows_are_renewed_when_a_bias_thaws(kind, approx):
    build, size, shape = THAWING[kind]
    model = nn.Sequential(seeded_build(build))
    x, y = 0.05 * noise(*size), noise(*shape, seed=1) + 1
    model[0].bias.requires_grad_(False)
    opt = plain_hylo(model, approx=approx, update_steps=LATER)
    step(opt, model, x, y, squares)
    assert opt.state[model[0].weight]["refreshes"] == 1
    model[0].bias.requires_grad_(True)
    opt.zero_grad()
    squares(model(x), y).backward()
    assert opt.state[model[0].weight]["refreshes"] == 0
    with opt.keep_directions() as kept:
        opt.step()
    assert opt.state[model[0].weight]["refreshes"] == 1
    assert float(flat(gradients(model)) @ flat(kept)) > 0
    if approx == "expand":
        U = as_rows(model, "0", example_gradients(model, (x,), y, squares))
        V, moved = (as_rows(model, "0", one(values))[:, 0] for values in (gradients(model), kept))
        assert_close(moved, sngd(U, V, 1e-2), 1e-6)


@pytest.mark.parametrize("thawed", [True, False])
def test_rows_of_another_bias_are_refused(thawed):
    model, other = mlp((4, 3)), mlp((4, 3))
    (model if thawed else other)[0].bias.requires_grad_(False)
    opt, second = plain_hylo(model), plain_hylo(other)
    train(opt, model, 0, 2)
    train(second, other, 5, 7)
    before = tensors_of(second)
    with pytest.raises(ValueError, match="rows_a"):
        second.load_state_dict(opt.state_dict())
    assert_same(tensors_of(second), before)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def frozen_first() -> nn.Sequential:
    model = mlp((4, 5, 6, 3))
    model[0].requires_grad_(False)
    return model


def test_what_a_policy_remembers_is_kept_where_the_first_layer_is_frozen():
    """In the middle of a period, with a decision taken before."""
    built = {"lr": 0.05, "mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=3), "rank_fraction": 0.3}
    model, other = frozen_first(), frozen_first()
    opt, second = plain_hylo(model, **built), plain_hylo(other, **built)
    train(opt, model, 0, 10)
    second.load_state_dict(opt.state_dict())
    assert second.switch.state_dict() == pytest.approx(opt.switch.state_dict(), rel=0, abs=0, nan_ok=True)
    assert not math.isnan(second.switch.state_dict()["last_norm"])
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]
    assert_goes_on(opt, model, second, other)


def test_a_policy_is_remembered_where_no_curvature_is():
    built = {"lr": 0.05, "mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=3), "rank_fraction": 0.3}
    model, other = mlp(), mlp()
    opt, second = (plain_hylo(m, checkpoint_curvature="none", **built) for m in (model, other))
    train(opt, model, 0, 10)
    second.load_state_dict(opt.state_dict())
    assert second.switch.state_dict() == pytest.approx(opt.switch.state_dict(), rel=0, abs=0, nan_ok=True)
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]


@pytest.mark.parametrize("theirs", MODES)
@pytest.mark.parametrize("ours", MODES)
def test_a_checkpoint_decides_the_mode(ours, theirs):
    model, other = mlp(), mlp()
    opt, second = (plain_hylo(m, lr=0.01, mode=k, rank_fraction=0.4) for m, k in ((model, theirs), (other, ours)))
    train(opt, model, 0, 2)
    train(second, other, 5, 6)
    second.load_state_dict(opt.state_dict())
    assert second.param_groups[0]["mode"] == theirs
    assert_goes_on(opt, model, second, other, 3)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("how", ["set", "scheduled"])
@pytest.mark.parametrize(("before", "after"), [("auto", "kid"), ("kid", "auto"), ("sngd", "auto"), ("auto", "kis")])
def test_a_mode_that_changed_goes_with_the_checkpoint(before, after, how, stepped):
    """Before and after the first step with it."""
    for built in (before, after):
        model, other = mlp(), mlp()
        opt, second = (plain_hylo(m, lr=0.01, mode=mode) for m, mode in ((model, before), (other, built)))
        schedule = ParamScheduler(opt, mode={0: before, 3: after}) if how == "scheduled" else None
        for seed in range(3):
            train(opt, model, seed, seed + 1)
            if schedule is not None:
                schedule.step()
        opt.param_groups[0]["mode"] = after
        train(opt, model, 3, 3 + stepped)
        second.load_state_dict(opt.state_dict())
        assert second.param_groups[0]["mode"] == after
        assert_goes_on(opt, model, second, other, 3)


def test_substituted_factors_load_where_nothing_would_be_substituted():
    model, other = mlp(), mlp()
    options = {"lr": 0.01, "mode": "kid", "rank_fraction": 1.0, "update_steps": 2}
    opt, second = plain_hylo(model, kfac_when_cheaper=True, **options), plain_hylo(other, **options)
    train(opt, model, 0, 3, 64)
    assert all(b.is_factored for b in opt.blocks.values())
    train(second, other, 5, 6, 64)
    second.load_state_dict(opt.state_dict())
    assert all(b.is_factored for b in second.blocks.values())
    assert_goes_on(opt, model, second, other)


def test_substituted_factors_stay_when_nothing_is_substituted_any_more():
    model, other = mlp(), mlp()
    options = {"lr": 0.01, "mode": "kid", "rank_fraction": 1.0}
    opt, second = plain_hylo(model, kfac_when_cheaper=True, **options), plain_hylo(other, **options)
    train(opt, model, 0, 2, 64)
    opt.param_groups[0]["kfac_when_cheaper"] = False
    train(opt, model, 2, 4, 64)
    second.load_state_dict(opt.state_dict())
    assert_goes_on(opt, model, second, other)


def test_a_state_of_another_policy_is_refused_and_may_be_left_out():
    policies = {"theirs": EpochList([(0, 1)], steps_per_epoch=3), "ours": LRChange(hold=2, period_steps=4)}
    model, other = mlp(), mlp()
    opt = plain_hylo(model, lr=0.01, mode="auto", switch=policies["theirs"], rank_fraction=0.3)
    second = plain_hylo(other, lr=0.02, mode="auto", switch=policies["ours"], rank_fraction=0.3)
    train(opt, model, 0, 5)
    train(second, other, 5, 7)
    saved = copy.deepcopy(opt.state_dict())
    before, told = tensors_of(second), second.diagnostics()
    with pytest.raises(ValueError, match=r"switch_state.*LRChange"):
        second.load_state_dict(saved)
    assert_same(tensors_of(second), before)
    assert second.diagnostics() == told
    assert second.param_groups[0]["lr"] == 0.02
    for found in saved["state"].values():
        found.pop("switch_state", None)
    second.load_state_dict(saved)
    assert second.diagnostics()["step"] == 5
    fresh = LRChange(hold=2, period_steps=4).state_dict()
    assert second.switch.state_dict() == pytest.approx(fresh, nan_ok=True)
    train(second, other, 7, 9)


def test_policies_that_remember_nothing_are_told_apart():
    model, other = mlp(), mlp()
    opt = plain_hylo(model, mode="auto", switch=EpochList([(0, 1)], steps_per_epoch=3))
    second = plain_hylo(other, mode="auto", switch=Always("kis"))
    train(opt, model, 0, 1)
    with pytest.raises(ValueError, match=r"switch_state.*Always"):
        second.load_state_dict(opt.state_dict())


def test_the_log_of_switches_ends_at_the_loaded_step():
    model, policy = mlp(), EpochList([(0, 2), (4, 5)], steps_per_epoch=2)
    opt = plain_hylo(model, mode="auto", switch=policy, rank_fraction=0.3)
    train(opt, model, 0, 5)
    saved = copy.deepcopy(opt.state_dict())
    train(opt, model, 5, 12)
    logged = opt.diagnostics()["switches"]
    assert [list(switch) for switch in logged] == [[0, "kid"], [4, "kis"], [8, "kid"], [10, "kis"]]
    assert copy.deepcopy(opt).diagnostics()["switches"] == logged
    opt.load_state_dict(saved)
    assert opt.diagnostics()["switches"] == logged[:2]
    train(opt, model, 5, 12)
    assert opt.diagnostics()["switches"] == logged


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------------------------------------------------


def test_single_precision_does_not_end_at_a_number_of_rows():
    errors = {}
    for n in (1024, 1025, 1500):
        model, (x, y) = mlp((16, 8)), targets(n, 16, 8)
        U = as_rows(model, "0", example_gradients(model, (x,), y, squares))
        damping = 4e-4 * float(torch.linalg.eigvalsh(U[0].T @ U[0] / n)[-1])
        squares(model(x), y).backward()
        exact = sngd(U, as_rows(model, "0", one(gradients(model)))[:, 0], damping)
        single = mlp((16, 8)).float()
        opt = plain_hylo(single, damping=damping)
        kept = step(opt, single, x.float(), y.float(), squares)
        errors[n] = error(as_rows(single, "0", one(kept))[:, 0].double(), exact)
    assert errors[1024] < 2e-3
    assert max(errors.values()) < 5 * errors[1024]


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (7, 3, 9)], ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("cheaper", [False, True])
def test_a_table_of_six_and_micro_batches_of_different_lengths(cheaper, lengths):
    """Indices are kept of fewer positions than the table has columns, per-example gradients of more."""
    model, plain = seeded_build(Words), seeded_build(Words)
    opt = plain_hylo(model, approx="expand", kfac_when_cheaper=cheaper)
    found = []
    for seed, length in enumerate(lengths):
        x, y = labels(4 * length, 6, seed).reshape(4, length), labels(4, 3, seed)
        (F.cross_entropy(model(x), y) / len(lengths)).backward()
        found.append(example_gradients(plain, (x,), y, F.cross_entropy, at_once=False))
    with opt.keep_directions() as kept:
        opt.step()
    U = as_rows(model, "table", {name: torch.cat([part[name] for part in found]) for name in found[0]})
    V, moved = (as_rows(model, "table", one(values))[:, 0] for values in (gradients(model), dict(kept)))
    assert_close(moved, sngd(U, V, 1e-2), 1e-8)


class Branches(nn.Module):
    """A layer that takes part in some forwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.used = nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.rare(x) if self.both else self.used(x)


def test_rows_of_a_step_that_failed_are_forgotten(monkeypatch):
    model = seeded_build(Branches)
    opt = plain_hylo(model)

    def broken(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(woodbury, "damped_inverse", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(opt, model, *vectors(), F.cross_entropy)
    model.both = False
    step(opt, model, *vectors(seed=1), F.cross_entropy)
    assert opt.state[model.used.weight]["refreshes"] == 1
    assert opt.state[model.rare.weight]["refreshes"] == 0
    assert opt.memory_usage()["pending"] == 0


def test_a_refresh_that_fails_leaves_rows_and_their_kind():
    """Rows of 1e22 are finite in single precision, their products are not."""
    model, (x, y) = mlp((4, 3)).float(), targets()
    x, y = x.float(), y.float()
    opt = plain_hylo(model, mode="kid", rank_fraction=0.3, update_steps=2)
    step(opt, model, x, y, squares)
    before, matrix = tensors_of(opt), opt.dense_curvature("0").clone()
    direction = with_gradient(opt, model, 0)
    opt.param_groups[0]["mode"] = "kis"
    step(opt, model, x * 1e11, y, squares)
    assert opt.diagnostics()["refresh_failures"] == 1
    assert_close(opt.dense_curvature("0"), matrix, 0)
    after = tensors_of(opt)
    for key in ("rows_a", "rows_g", "kernel", "kernel_damping", "interpolated"):
        assert torch.equal(after[f"0.{key}"], before[f"0.{key}"]), key
    assert torch.equal(flat(with_gradient(opt, model, 0)), flat(direction))


# ---------------------------------------------------------------------------------------------------------------------
# Draws, ranks and stacks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", selection.SAMPLINGS)
@pytest.mark.parametrize("layer", [0, 2])
def test_draws_of_a_layer_do_not_depend_on_the_others(layer, sampling):
    found = []
    for how in ("alone", "frozen", "together"):
        model = mlp((6, 6, 6))
        skipped = [str(2 - layer)] if how == "alone" else []
        if how == "frozen":
            model[2 - layer].requires_grad_(False)
        opt = plain_hylo(model, mode="kis", rank_fraction=0.25, kis_sampling=sampling, skip_layers=skipped)
        for seed in range(2):
            step(opt, model, *targets(32, 6, 6, seed), squares)
        found.append({k: v for k, v in tensors_of(opt).items() if k in (f"{layer}.rows_a", f"{layer}.rows_g")})
    for other in found[1:]:
        for key, value in found[0].items():
            assert_close(other[key], value, 1e-12, key)


def fewest(U: Tensor, share: float) -> int:
    """Pivots that hold a share of the trace."""
    K = U @ U.T
    chosen = greedy(K, len(K))
    for r in range(1, len(chosen)):
        left = K - K[:, chosen[:r]] @ torch.linalg.solve(K[chosen[:r]][:, chosen[:r]], K[chosen[:r]])
        if float(left.trace()) <= (1 - share) * float(K.trace()):
            return r
    return len(chosen)


class Spread(nn.Module):
    """A grouped convolution, a narrow and a wide layer: kernels of different energies."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 2, groups=2)
        self.narrow, self.wide = nn.Linear(24, 1), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.conv(x)).flatten(1)
        return self.narrow(z) + self.wide(z)


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_an_energy_asks_each_layer_for_its_own_rank(mode):
    """In multiples of 8, as many as the neediest group wants, no more than there are."""
    model, plain = seeded_build(Spread), seeded_build(Spread)
    x, y = noise(30, 4, 3, 3), noise(30, 6, seed=3)
    x[:, 2:] = 0  # the second group has but a bias
    wanted = {}
    found = example_gradients(plain, (x,), y, squares)
    for name in ("conv", "narrow", "wide"):
        needed = [fewest(U, 0.9) for U in as_rows(plain, name, found)]
        wanted[name] = min(-(-max(needed) // 8) * 8, 30)
        assert name != "conv" or max(needed) > 8 > min(needed)
    assert len(set(wanted.values())) > 1
    opt = plain_hylo(model, mode=mode, rank_energy=0.9, rank_fraction=1.0)
    step(opt, model, x, y, squares)
    assert opt.diagnostics()["rank"] == wanted
    opt.param_groups[0]["max_rank"] = 10
    step(opt, model, x, y, squares)
    assert opt.diagnostics()["rank"] == {name: min(r, 10) for name, r in wanted.items()}


@pytest.mark.parametrize("energy", [None, 0.5])
def test_a_stack_of_kernels_counts_the_groups_of_its_blocks(energy, monkeypatch):
    sizes, original = [], selection.interpolate

    def watched(matrix: Tensor, *args, **keywords):
        sizes.append(matrix.numel())
        return original(matrix, *args, **keywords)

    def build() -> nn.Sequential:
        return seeded_build(lambda: nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(5))))

    x, kept = noise(8, 16, 4, 4), []
    for bound in (2 * 16 * 8 * 8, stacks.LIMIT):
        monkeypatch.setattr(stacks, "LIMIT", bound)
        model = build()
        opt = plain_hylo(model, mode="kid", rank_fraction=0.5, rank_energy=energy)
        with monkeypatch.context() as patch:
            patch.setattr(selection, "interpolate", watched)
            kept.append(flat(step(opt, model, x, torch.zeros(8, 1, 1, 1), squares)))
    rounds = 1 if energy is None else 2
    assert sizes == [*[2048, 2048, 1024] * rounds, *[5 * 1024] * rounds]
    assert_close(kept[0], kept[1], 1e-9)


@pytest.mark.parametrize("approx", ["reduce", "expand"])
@pytest.mark.parametrize("mode", [*MODES, "energy", "cheaper"])
def test_a_state_holds_nothing_but_itself(mode, approx):
    """No parts of stacks or of the batch: they would be kept whole in memory, and written whole to files."""
    options = {"energy": {"mode": "kid", "rank_energy": 0.5}, "cheaper": {"mode": "kid", "kfac_when_cheaper": True}}
    model = seeded_build(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)))
    opt = plain_hylo(model, approx=approx, **options.get(mode, {"mode": mode, "rank_fraction": 0.3}))
    for seed, n in enumerate((12, 12, 8)):
        x = labels(n * 6, 9, seed).reshape(n, 6)
        step(opt, model, x, torch.zeros(n, 6, 5, dtype=torch.float64), squares)
    for p in opt.state:
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes, key


# ---------------------------------------------------------------------------------------------------------------------
# Factors instead of rows
# ---------------------------------------------------------------------------------------------------------------------


def test_what_substitution_costs_is_told_in_rows():
    """R rows of S positions: numbers grow with S, the kernel that is inverted does not."""
    model = seeded_build(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    opt = plain_hylo(model, mode="kid", approx="expand", kfac_when_cheaper=True, rank_fraction=0.5)
    step(opt, model, noise(8, 5, 8), noise(8, 5, 4, seed=1), squares)
    first, last = (line for line in opt.describe().splitlines() if ".weight" in line)
    # Whole gradients of 6·9 and 4·7 numbers are smaller than 5 positions of 6 + 9 and 4 + 7.
    assert "numbers 216 against 117" in first
    assert "R³ = 64 against 945" in first
    assert "numbers 112 against 65" in last
    assert "R³ = 64 against 407" in last


def damped(opt: HyLo, model: nn.Module, x: Tensor, y: Tensor, name: str) -> float:
    """λ from a direction and the curvature: (F̂ + λI) d = V."""
    kept = step(opt, model, x, y, squares)
    V, d = (as_rows(model, name, one(values))[0, 0] for values in (gradients(model), kept))
    return float(d @ (V - opt.dense_curvature(name) @ d) / (d @ d))


@pytest.mark.parametrize("cheaper", [False, True])
def test_a_damping_that_changes_acts_from_the_next_refresh_on(cheaper):
    model, (x, y) = mlp((4, 3)), targets(32)
    opt = plain_hylo(model, kfac_when_cheaper=cheaper, damping=1.0, update_steps=3)
    found = []
    for number in range(7):
        if number == 2:
            opt.param_groups[0]["damping"] = 0.1
        found.append(damped(opt, model, x, y, "0"))
    assert opt.blocks["0"].is_factored == cheaper
    assert found == pytest.approx([1.0] * 3 + [0.1] * 4)


@pytest.mark.parametrize("approx", ["reduce", "expand"])
def test_a_relative_damping_means_the_same_for_factors(approx):
    """λ times the trace of the kernel over the number of examples."""
    found = []
    for cheaper in (False, True):
        model, (x, y) = mlp((4, 3)), targets(32)
        U = as_rows(model, "0", example_gradients(model, (x,), y, squares))[0]
        opt = plain_hylo(model, approx=approx, kfac_when_cheaper=cheaper, damping=0.5, damping_mode="relative")
        found.append(damped(opt, model, x, y, "0"))
        assert opt.blocks["0"].is_factored == cheaper
    assert found == pytest.approx([0.5 * float(U.square().sum()) / 32 / 32] * 2)


# ---------------------------------------------------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------------------------------------------------


def measured(**keywords) -> tuple[float, dict[str, int]]:
    """The error that the first refresh measured, and the ranks."""
    model = mlp((6, 8, 4))
    opt = plain_hylo(model, mode="auto", switch=ProbeError(layers=2), **keywords)
    step(opt, model, *targets(32, 6, 4), squares)
    return opt.switch.state_dict()["error"], opt.diagnostics()["rank"]


def test_a_probe_measures_the_rank_that_an_energy_keeps():
    by_fraction, by_energy = measured(rank_fraction=0.25), measured(rank_energy=0.05)
    assert by_fraction[1] == by_energy[1] == {"0": 8, "2": 8}
    assert by_energy[0] == by_fraction[0] > 1e-3


class Listening(SwitchPolicy):
    """Remembers what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.heard: list[float] = []

    @property
    def probes(self) -> int:
        return 1

    def probe(self, error: Tensor) -> None:
        self.heard.append(float(error))

    def decide(self, step: int) -> str:
        self.asked.append(step)
        return "kis"


@pytest.mark.parametrize("fixed", ["kid", "kis", "sngd"])
def test_a_fixed_mode_neither_asks_nor_is_probed(fixed):
    found = []
    for skipped in ([], ["0"]):
        model = mlp((6, 8, 4))
        first, second = {"mode": fixed, "update_steps": 1}, {"mode": "auto", "update_steps": 4}
        opt = two_groups(model, first, second, switch=Listening(), rank_fraction=0.25, skip_layers=skipped)
        for seed in range(9):
            step(opt, model, *targets(32, 6, 4, seed), squares)
        assert opt.switch.asked == [0, 4, 8]
        found.append(opt.switch.heard)
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert min(found[0]) > 1e-3


def test_a_change_of_the_rate_is_heeded_by_those_that_ask():
    """A refresh of a fixed mode comes first."""
    answers = []
    for fixed in (False, True):
        model = mlp()
        first = {"mode": "kid", "update_steps": 1} if fixed else {"mode": "auto"}
        switch = LRChange(hold=1, period_steps=1)
        opt = two_groups(model, first, {"mode": "auto"}, lr=0.1, switch=switch, update_steps=5, rank_fraction=0.3)
        for seed in range(11):
            if seed == 2:
                for group in opt.param_groups:
                    group["lr"] = 0.01
            train(opt, model, seed, seed + 1)
        answers.append([list(switch) for switch in opt.diagnostics()["switches"]])
    assert answers[0] == answers[1] == [[0, "kis"], [5, "kid"], [10, "kis"]]


def test_a_policy_is_refused_only_where_no_group_asks_it():
    switch = ProbeError()
    opt = two_groups(mlp(), {"mode": "kid"}, {}, mode="auto", switch=switch)
    assert opt.diagnostics()["modes"][0] == "kid"
    two_groups(mlp(), {}, {"mode": "auto"}, mode="kid", switch=switch)
    for first, second, mode in (({"mode": "kid"}, {"mode": "kis"}, "auto"), ({}, {"mode": "kis"}, "sngd")):
        with pytest.raises(ValueError, match="ProbeError"):
            two_groups(mlp(), first, second, mode=mode, switch=switch)
    with pytest.raises(ValueError, match="ProbeError"):
        plain_hylo(mlp(), mode="kid", switch=switch)


class Nonsense(SwitchPolicy):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __repr__(self) -> str:
        return f"Nonsense({self.answer!r})"

    def decide(self, step: int) -> str:
        return self.answer


@pytest.mark.parametrize("answer", ["KID", "auto", ""])
def test_an_answer_that_is_no_mode_is_refused(answer):
    model = mlp()
    opt = plain_hylo(model, mode="auto", switch=Nonsense(answer))
    with pytest.raises(ValueError, match=f"Nonsense.*got '{answer}'"):
        train(opt, model, 0, 1)


@pytest.mark.parametrize("kind", ["factors", "rows"])
def test_a_trend_has_the_mode_of_each_layer(kind, tmp_path):
    model = mlp((4, 3, 3))
    first = {"mode": "kid", "kfac_when_cheaper": kind == "factors", "rank_fraction": 1.0}
    opt = two_groups(model, first, {"mode": "kis"})
    with Analysis(opt, tmp_path, every=1):
        train(opt, model, 0, 2, 64)
    found = {(event["step"], event["layer"]): event["mode"] for event in read_events(tmp_path / "trend.jsonl")}
    modes = {"0": "kfac" if kind == "factors" else "kid", "2": "kis"}
    assert {key: mode for key, mode in found.items() if key[1] in modes} == {
        (t, name): mode for t in range(2) for name, mode in modes.items()
    }


def test_a_dropped_batch_is_heard_of():
    """A rate that changed in it changed in its own step."""
    runs = []
    for bad in (False, True):
        model = mlp()
        switch = LRChange(hold=1, period_steps=3)
        opt = plain_hylo(model, lr=0.1, mode="auto", switch=switch, rank_fraction=0.3)
        for seed in range(12):
            if seed == 5:
                opt.param_groups[0]["lr"] = 0.01
            x, y = vectors(12, seed=seed)
            step(opt, model, x * float("nan") if bad and seed == 5 else x, y, F.cross_entropy)
        assert opt.diagnostics()["skipped_steps"] == int(bad)
        assert opt.switch.state_dict()["changed_at"] == 5
        runs.append([list(switch) for switch in opt.diagnostics()["switches"]])
    assert runs[0] == [[0, "kis"], [5, "kid"], [8, "kis"]]
    assert runs[1] == [[0, "kis"], [6, "kid"], [8, "kis"]]


def reachable(found: object, seen: dict[int, int]) -> dict[int, int]:
    """Bytes by storage of all tensors in containers and in the attributes of policies."""
    if isinstance(found, Tensor):
        seen[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    elif isinstance(found, dict):
        for value in found.values():
            reachable(value, seen)
    elif isinstance(found, list | tuple | set):
        for value in found:
            reachable(value, seen)
    elif type(found).__module__.startswith("secondorder"):
        reachable(vars(found), seen)
    return seen


@pytest.mark.parametrize(
    "switch",
    [GradNormChange(period_steps=100), LRChange(), ProbeError(), Always("kis")],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("cheaper", [False, True])
def test_memory_counts_what_a_policy_remembers(cheaper, switch):
    model = mlp((4, 9, 3))
    opt = plain_hylo(model, momentum=0.9, mode="auto", switch=switch, kfac_when_cheaper=cheaper)
    train(opt, model, 0, 3, 16)
    held = reachable([dict(opt.state), opt.switch, opt._runtime.workspace], {})
    assert opt.memory_usage()["total"] == sum(held.values())


def test_a_policy_survives_a_load_while_nobody_asks_it():
    """Modes are scheduled: the policy rests, and goes on with what it remembers."""

    def run(loads: bool) -> list[str]:
        model = mlp((4, 3))
        opt = HyLo(model, lr=0.0, update_steps=1, switch=GradNormChange(eta=10.0, period_steps=2))
        schedule, modes = ParamScheduler(opt, mode={0: "auto", 8: "sngd", 10: "auto"}), []
        for number in range(14):
            if loads and number == 9:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            x, y = vectors(8, seed=number)
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            modes.append(opt.diagnostics()["mode"])
            schedule.step()
        return modes

    assert run(loads=True) == run(loads=False)


def test_the_ranks_of_an_energy_do_not_depend_on_other_layers():
    def rank(*others: nn.Module) -> int:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(6, 1, bias=False), **{str(i): m for i, m in enumerate(others)}}).float()
        for other in others:
            other.double()
        opt = HyLo(model, lr=0.1, mode="kid", rank_energy=0.9999999)
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        loss = model["a"](x).square().sum() + sum(m(x.double()).square().sum() for m in others)
        loss.backward()
        opt.step()
        return opt.diagnostics()["rank"]["a"]

    assert rank() == rank(nn.Linear(6, 2)) == 8


def test_factors_need_a_number_of_rows_to_compare_with():
    with pytest.raises(ValueError, match=r"kfac_when_cheaper=True .* rank_energy"):
        HyLo(nn.Linear(3, 2), kfac_when_cheaper=True, rank_energy=0.9)


def test_describe_keeps_its_numbers_when_a_bias_is_frozen():
    model = nn.Sequential(nn.Linear(6, 5)).double()
    opt = HyLo(model, lr=0.0, kfac_when_cheaper=True, rank_fraction=1.0, update_steps=1)
    for frozen in (False, True):
        model[0].bias.requires_grad_(not frozen)
        opt.zero_grad()
        model(torch.randn(40, 6, dtype=torch.float64)).square().mean().backward()
        opt.step()
        assert "R³ = 64,000" in opt.describe()


def test_a_norm_in_half_precision_does_not_overflow():
    model = nn.Linear(300, 300, dtype=torch.float16)
    opt = HyLo(model, lr=0.0, switch=GradNormChange(period_steps=1))
    for p in model.parameters():
        p.grad = torch.full_like(p, 300.0)
    assert torch.isfinite(opt.preconditioner._norm({p: p.grad for p in model.parameters()}))


@pytest.mark.parametrize("mode", ["kid", "kis", "sngd"])
@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_a_layer_that_only_some_micro_batches_pass(mode, fraction):
    """Its rows are those of the examples that passed it; F is the mean over all of the step."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sometimes, self.always = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, through: bool) -> Tensor:
            return self.always(self.sometimes(x) if through else x)

    model = Branching().double()
    opt = HyLo(model, lr=0.0, mode=mode, rank_fraction=fraction, damping=0.1, switch=None)
    x, _ = vectors(16)
    for part, through in zip(x.chunk(2), (True, False), strict=True):
        (model(part, through).square().sum(1).mean() / 2).backward()
    with opt.keep_directions() as kept:
        opt.step()
    assert opt.diagnostics()["rank"]["sometimes"] == (2 if fraction == 0.1 and mode != "sngd" else 8)
    if mode == "sngd" or fraction == 1.0:
        with torch.no_grad():
            passed = x[:8]
            g = model.sometimes(passed) @ model.always.weight.T + model.always.bias
            g = 2 * g @ model.always.weight
        u = (g[:, :, None] * torch.cat([passed, torch.ones(8, 1).double()], 1)[:, None, :]).flatten(1)
        gradient = u.sum(0) / 16
        expected = torch.linalg.solve(u.T @ u / 16 + 0.1 * torch.eye(20).double(), gradient).view(4, 5)
        assert_close(kept["sometimes.weight"], expected[:, :4])
