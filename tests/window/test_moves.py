"""What a window does when parameters are cast, moved, removed or added, and when options change during a run."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, TopK
from secondorder.preconditioners import window_plan
from tests.support import window
from tests.support.building import built
from tests.support.grid import each
from tests.support.tasks import snapshot
from tests.support.window import assert_near, differences, flat, give, gram, noise, parameters, push, stored_rows
from tests.support.window_storages import METHODS, STORAGES, Storage, regular

SHAPES, D, M = [(4, 5), (3,), (3, 7)], 44, 4
KINDS = ("dense", "topk", "rank-1")
MOVED = (*KINDS, "bfloat16", "topk-4-bit")


def live_rows(opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], kind: Storage) -> Tensor:
    return torch.cat([stored_rows(opt.state[p], p.numel(), kind.block_size) for p in params], dim=1)


def assert_consistent(opt: Any, params: Sequence[nn.Parameter], kind: Storage, tolerance: float = 1e-12) -> Tensor:
    """Assert that the Gram matrix of the window of ``params`` is that of its rows, which are returned."""
    rows = live_rows(opt, params, kind)
    assert_near(gram(opt.state[params[0]]), rows @ rows.mT, tolerance)
    return rows


def random_step(opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], seed: int) -> Tensor:
    return push(opt, params, noise(sum(p.numel() for p in params), seed=seed))


def trained(params: Any, steps: int = 6, method: str = "mfac", **keywords: Any) -> Any:
    """An optimizer after some steps with random gradients."""
    opt = built(METHODS[method], params, **{"lr": 1.0, "window_size": M, **regular(method, 1e-2), **keywords})
    for step in range(steps):
        random_step(opt, [p for group in opt.param_groups for p in group["params"]], step)
    return opt


def network(dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter]]:
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)
    return net, list(net.parameters())


# ---------------------------------------------------------------------------------------------------------------- casts
@each(storage=[*KINDS, "topk-odd-blocks"], to=[torch.float64, torch.float32], steps=[2, 7])
def test_casting_the_model(to: torch.dtype, storage: str, steps: int) -> None:
    """A copy that is made before the optimizer noticed the cast takes the same steps."""
    kind = STORAGES[storage]
    net, params = network(torch.float32 if to == torch.float64 else torch.float64)
    opt = trained(net, steps, **kind.keywords)
    before = live_rows(opt, params, kind)
    net.to(to)
    unnoticed = copy.deepcopy(opt)
    state = window.states(opt)
    for i in range(len(params)):
        rows = {key for key in state[i] if key in {"window", "window_val", "tail_val", "window_p", "window_q"}}
        errors = {key for key in state[i] if key in {"error", "tail_error"}}
        assert rows
        assert bool(errors) == (storage != "dense" and (storage != "rank-1" or params[i].dim() > 1))
        assert {state[i][key].dtype for key in rows | errors} == {to}
    assert int(state[0]["count"]) == steps
    narrow_products = to == torch.float32 and storage != "dense"
    after = assert_consistent(opt, params, kind, 5e-7 if narrow_products else 1e-14)
    assert_near(after, before, 1e-6)
    twins = [unnoticed, copy.deepcopy(opt)]
    u = random_step(opt, params, 99)
    assert u.any()
    for twin in twins:
        assert torch.equal(random_step(twin, [p for group in twin.param_groups for p in group["params"]], 99), u)
        assert differences(snapshot(opt), snapshot(twin)) == set()


def test_float32_rows_loaded_as_bfloat16() -> None:
    params, others = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    wide, narrow = trained(params), trained(others, 0, window_dtype=torch.bfloat16)
    narrow.load_state_dict(snapshot(wide))
    rows = assert_consistent(narrow, others, STORAGES["bfloat16"])
    assert torch.equal(rows, live_rows(wide, params, STORAGES["dense"]).bfloat16().double())
    random_step(narrow, others, 9)
    assert_consistent(narrow, others, STORAGES["bfloat16"])


# ------------------------------------------------------------------------------------- parameters that leave or change
@each(storage=MOVED, method=list(METHODS), gone=[0, 2], steps=[2, 7])
def test_removing_a_parameter_keeps_the_rows_of_the_others(method: str, storage: str, gone: int, steps: int) -> None:
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt = trained(params, steps, method, **kind.keywords)
    kept = [p for i, p in enumerate(params) if i != gone]
    before = live_rows(opt, kept, kind)
    left = opt.param_groups[0]["params"].pop(gone)
    opt.zero_grad()
    left.grad = None
    opt.step()  # without gradients the plan is updated, but the rows stay
    assert torch.equal(assert_consistent(opt, kept, kind), before)
    assert torch.isfinite(random_step(opt, kept, 50)).all()
    assert_consistent(opt, kept, kind)
    assert not set(opt.state[left]) & set(opt.preconditioner.table.entries)


@pytest.mark.parametrize("storage", MOVED)
def test_moving_a_parameter_to_another_group_keeps_its_rows(storage: str) -> None:
    kind, params = STORAGES[storage], parameters([(4, 5), (3,), (3, 7), (2, 3)])
    opt = trained([{"params": params[:2]}, {"params": params[2:]}], partition="group", **kind.keywords)
    before = live_rows(opt, params, kind)
    opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop(0))
    opt.zero_grad()
    opt.step()
    assert torch.equal(live_rows(opt, params, kind), before)
    for unit in (params[1:2], [*params[2:], params[0]]):
        assert_consistent(opt, unit, kind)
    assert random_step(opt, params, 9).isfinite().all()
    for unit in (params[1:2], [*params[2:], params[0]]):
        assert_consistent(opt, unit, kind)


@each(storage=MOVED, together=[True, False])
def test_attach_merges_windows_of_parameters_into_those_of_layers(storage: str, together: bool) -> None:
    """Windows that were not filled in the same steps have no rows in common, so they start again."""
    kind = STORAGES[storage]
    net, params = network(torch.float64)
    opt = trained(net.parameters(), 0, partition="layer", **kind.keywords)
    for step in range(6):
        give(params, noise(39, seed=step))
        if step == 3 and not together:
            params[0].grad = None
        opt.step()
    assert len(opt.diagnostics()["units"]) == 4
    before = live_rows(opt, params, kind)
    opt.attach(net)
    assert set(opt.diagnostics()["units"]) == {"0", "1"}
    after = live_rows(opt, params, kind)
    assert torch.equal(after[:, 24:], before[:, 24:])
    assert torch.equal(after[:, :24], before[:, :24] if together else torch.zeros(M, 24, dtype=torch.float64))
    for seed in (None, 8, 9):
        if seed is not None:
            assert torch.isfinite(random_step(opt, params, seed)).all()
        assert_consistent(opt, params[:2], kind)
        assert_consistent(opt, params[2:], kind)


# ------------------------------------------------------------------------------------------------- groups and schedules
def test_scheduled_betas_are_saved_before_the_first_step_and_passed_on_to_a_later_group() -> None:
    params, others, late = parameters(SHAPES), parameters(SHAPES), parameters([(6,)])
    opt, new = GGT(params, lr=0.1, window_size=M), GGT(others, lr=0.1, window_size=M)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20)
    assert opt.param_groups[0]["betas"][0] > 0
    saved = snapshot(opt)
    opt.load_state_dict(saved)
    new.load_state_dict(saved)
    assert new.param_groups[0]["betas"] == opt.param_groups[0]["betas"]
    for step in range(6):
        u = random_step(opt, params, step)
        assert u.any()
        assert torch.equal(u, random_step(new, others, step))
    schedule.step()
    assert opt.param_groups[0]["betas"] != opt.defaults["betas"]
    opt.add_param_group({"params": late})
    assert opt.param_groups[1]["betas"] == opt.param_groups[0]["betas"]
    u = random_step(opt, params + late, 6)
    assert torch.isfinite(u).all()
    assert u[D:].any()


@each(storage=KINDS, m=[2, 7])
def test_the_window_size_may_change_just_before_saving(storage: str, m: int) -> None:
    kind, params, others = STORAGES[storage], parameters(SHAPES), parameters(SHAPES)
    own = {"momentum": 0.5, "momentum_mode": "pre", **kind.keywords}
    opt, new = trained(params, **own), trained(others, 0, window_size=m, **own)
    opt.param_groups[0]["window_size"] = m
    saved = snapshot(opt)
    rows = torch.cat([stored_rows(saved["state"][i], p.numel(), kind.block_size) for i, p in enumerate(params)], dim=1)
    assert rows.shape == (m, D)
    assert saved["param_groups"][0]["window_size"] == m
    assert saved["state"][0]["gram"].numel() == m * (m + 1) // 2
    assert_near(gram(saved["state"][0]), rows @ rows.mT, 1e-12)
    new.load_state_dict(saved)
    assert torch.equal(random_step(opt, params, 9), random_step(new, others, 9))


def test_a_group_without_parameters() -> None:
    opt, params = MFAC([{"params": []}]), parameters(SHAPES)
    opt.step()
    saved = opt.state_dict()
    assert saved["state"] == {}
    opt.load_state_dict(saved)
    opt.add_param_group({"params": params})
    assert torch.isfinite(random_step(opt, params, 0)).all()


@pytest.mark.parametrize("storage", ["dense", "topk"])
def test_a_refused_group_changes_nothing(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(SHAPES)
    opt = trained(params, 3, **STORAGES[storage].keywords)
    before, known, described = snapshot(opt), set(opt.state), opt.describe()

    def refused() -> weakref.ref[nn.Parameter]:
        p = nn.Parameter(torch.zeros(300, 7, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="window"):
            opt.add_param_group({"params": [p]})
        return weakref.ref(p)

    with monkeypatch.context() as patch:
        patch.setattr(window_plan, "free_bytes", lambda device: 2000)
        trace = refused()
    gc.collect()
    assert trace() is None
    assert (len(opt.param_groups), set(opt.state), opt.describe()) == (1, known, described)
    assert differences(snapshot(opt), before) == set()
    opt.add_param_group({"params": parameters([(5,)])})
    assert torch.isfinite(random_step(opt, params, 4)).all()


@pytest.mark.parametrize("compression", [None, TopK(density=0.25, block_size=32)])
def test_a_pickle_holds_the_window_once(compression: TopK | None) -> None:
    params = parameters([(80,)] * 30, torch.float32)
    opt = trained(params, 1, window_size=32, compression=compression)
    held = opt.memory_usage()["window"]
    assert held > 1e5
    assert max(len(pickle.dumps(opt.__getstate__())), len(pickle.dumps(opt))) < 3 * held
    copied = pickle.loads(pickle.dumps(opt))
    assert torch.equal(flat(copied.param_groups[0]["params"]), flat(params))
    assert differences(snapshot(copied), snapshot(opt)) == set()
