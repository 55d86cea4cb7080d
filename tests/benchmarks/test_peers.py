"""Third-party optimizers: each trains, follows a schedule, counts its bytes, and reports missing packages."""

import os
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.peers import PEERS, available, evaluating, libraries, versions
from benchmarks.peers.checkouts import CHECKOUTS, PATHS, set_paths
from benchmarks.peers.layers import Matrix, heard_layers, hidden_matrices
from benchmarks.peers.muon import MatrixMuon, does_bfloat16, label, orthogonalise
from benchmarks.peers.peer import held_bytes
from benchmarks.recipes.tuned import OURS
from benchmarks.runner import optimizer_bytes, race
from benchmarks.workloads import PackageMissingError
from tests.support.workloads import trainer_of

PACKAGED = [name for name in PEERS if name not in CHECKOUTS and "autoencoder" in PEERS[name].recipes]
CASES = [(name, "chargpt") for name in PACKAGED] + [("singd", "resnet20"), ("muon", "multi30k"), ("muon", "unet")]
BLOCKED = {"soap": "pytorch_optimizer", "shampoo": "pytorch_optimizer", "psgd_kron": "pytorch_optimizer",
           "schedule_free": "schedulefree", "singd": "singd"}  # fmt: skip


def _regression(seed=0):
    """Inputs, targets of a linear map, and a model of two layers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 6, generator=generator)
    y = x @ torch.randn(6, 4, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return x, y, nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def _step(optimizer, model, x, y):
    """Take a step, and return the loss before it."""
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize(("name", "workload"), CASES)
def test_a_peer_takes_steps(name, workload, data_dir):
    trainer = trainer_of(name, workload, data_dir)
    known = [parameter.clone() for parameter in trainer.model.parameters()]
    race([trainer], 3)
    assert not trainer.diverged
    moved = [not torch.equal(old, new) for old, new in zip(known, trainer.model.parameters(), strict=True)]
    assert sum(moved) >= len(moved) - 1  # the bias of the keys of attention has no gradient


@pytest.mark.parametrize("name", PACKAGED)
def test_a_peer_lowers_a_quadratic(name):
    x, y, model = _regression()
    optimizer = PEERS[name].build(model, "digits", {"lr": 0.1 if name == "singd" else 0.03})
    losses = [_step(optimizer, model, x, y) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def test_every_workload_of_adamw_has_a_recipe():
    for name in PACKAGED:
        assert set(PEERS[name].recipes) == set(OURS["adamw"].recipes)
        for recipe in PEERS[name].recipes.values():
            assert set(recipe.searched) <= set(recipe.settings)
            assert recipe.times(2).settings["lr"] == pytest.approx(2 * recipe.settings["lr"])


def test_a_schedule_applies_to_all_groups():
    x, y, model = _regression()
    for name in PACKAGED:
        optimizer = PEERS[name].build(model, "digits")
        rates = [group["lr"] for group in optimizer.param_groups]
        schedule = LambdaLR(optimizer, lambda step: float(step == 0))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
        assert rates
        assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.0] * len(rates)
        known = [parameter.clone() for parameter in model.parameters()]
        optimizer.step()
        averaged = name == "schedule_free"  # continues to average at rate zero
        assert averaged or all(map(torch.equal, known, model.parameters()))


def test_bytes_are_counted():
    x, y, model = _regression()
    sizes = {}
    for name in PACKAGED:
        optimizer = PEERS[name].build(model, "digits")
        (model(x) - y).square().mean().backward()
        for _ in range(2):
            optimizer.step()
        sizes[name] = optimizer_bytes(optimizer) / 4
    (d_in, d_mid, d_out), weights, biases = (6, 8, 4), 6 * 8 + 8 * 4, 8 + 4
    parameters = weights + biases
    factors = d_in**2 + 2 * d_mid**2 + d_out**2
    with_bias = (d_in + 1) ** 2 + d_mid**2 + (d_mid + 1) ** 2 + d_out**2
    # Muon has momentum of the first matrix, and AdamW two vectors and a number of steps per other tensor.
    assert sizes["muon"] == d_in * d_mid + 2 * (parameters - d_in * d_mid) + 3
    assert sizes["soap"] == 2 * parameters + 2 * factors
    assert sizes["shampoo"] >= 3 * parameters
    assert sizes["psgd_kron"] == parameters + factors + biases
    assert sizes["schedule_free"] == 2 * parameters
    # Factors and their momenta; the gradient scale is a Python number.
    assert sizes["singd"] == parameters + 2 * with_bias


def test_shared_memory_and_the_model_do_not_count():
    base = torch.zeros(10)
    assert held_bytes([base, base[:2], {"a": nn.Linear(3, 3)}, "text"]) == 40
    assert held_bytes([base], leave_out=[base[3:]]) == 0


def test_a_state_dict_restores_the_state():
    for name in PACKAGED:
        x, y, model = _regression()
        optimizer = PEERS[name].build(model, "digits")
        _step(optimizer, model, x, y)
        other = _regression()[2]
        other.load_state_dict(model.state_dict())
        twin = PEERS[name].build(other, "digits")
        twin.load_state_dict(optimizer.state_dict())
        _step(optimizer, model, x, y)
        _step(twin, other, x, y)
        assert all(map(torch.equal, model.parameters(), other.parameters()))
        assert twin.param_groups[0] is twin.parts[0].param_groups[0]


def test_psgd_does_not_use_the_global_generator():
    x, y, _ = _regression()
    found = []
    for noise in (1, 2):
        model = _regression()[2]
        torch.manual_seed(noise)
        known = torch.get_rng_state()
        optimizer = PEERS["psgd_kron"].build(model, "digits")
        for _ in range(3):
            _step(optimizer, model, x, y)
        assert torch.equal(torch.get_rng_state(), known)
        found.append(model[0].weight.detach().clone())
    assert torch.equal(*found)
    seeds = [libraries._seed_of(_regression(seed)[2]) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert libraries.psgd_kron(_regression()[2], seed=3)._seed == 3


# Muon


def _polynomial(values, steps=5):
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def test_the_iteration_only_changes_singular_values():
    for shape in [(12, 12), (6, 20), (20, 6)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        found = orthogonalise(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(found, u @ torch.diag(_polynomial(s / s.norm())) @ vh)
        values = torch.linalg.svdvals(found)
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
def test_only_the_iteration_is_in_float32(nesterov):
    generator = torch.Generator().manual_seed(2)
    start, grads = torch.randn(16, 8, generator=generator), torch.randn(3, 16, 8, generator=generator)
    found = []
    for bfloat16 in (True, False):
        weight = nn.Parameter(start.clone())
        optimizer = MatrixMuon([Matrix(weight)], bfloat16, lr=0.1, nesterov=nesterov)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        found.append(weight.detach())
        assert torch.equal(weight.grad, grads[-1])
    torch.testing.assert_close(*found, rtol=0, atol=2e-2)
    assert not torch.equal(*found)


def test_precision_selects_the_iteration_of_muon(monkeypatch):
    used = []
    monkeypatch.setattr("benchmarks.peers.muon.orthogonalise", lambda x, *_: used.append(x.dtype) or x)
    for precision in ("bfloat16", "float32"):
        x, y, model = _regression()
        optimizer = PEERS["muon"].build(model, "digits", {"precision": precision})
        (model(x) - y).square().mean().backward()
        optimizer.step()
        assert used == [torch.float32] * (precision == "float32")
    assert (label() == "Muon") == does_bfloat16("cpu")


def test_convolutions_are_flattened_and_attention_is_split():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 2))
    (matrix,) = hidden_matrices(model)
    assert matrix.parameter is model[1].weight
    assert [view.shape for view in matrix.views(matrix.parameter)] == [(6, 36)]
    attention = nn.ModuleDict({"inner": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3)})
    inside, out = hidden_matrices(attention)
    assert [view.shape for view in inside.views(inside.parameter)] == [(8, 8)] * 3
    assert out.parameter is attention["inner"].out_proj.weight
    assert list(heard_layers(attention)) == ["head"]


def test_embeddings_and_tied_heads_do_not_count_as_hidden_matrices():
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "out": nn.Linear(4, 5)})
    model["out"].weight = model["words"].weight
    assert [matrix.parameter for matrix in hidden_matrices(model)] == [model["body"].weight]
    assert [matrix.parameter for matrix in hidden_matrices(model["body"])] == [model["body"].weight]
    with pytest.raises(ValueError, match="no hidden matrix"):
        PEERS["muon"].build(model["words"], None)


# Schedule-free


def test_averaged_weights_are_only_used_during_evaluation(data_dir, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.libraries.SETTLING", 3)
    trainer = trainer_of("schedule_free", "resnet20", data_dir)
    race([trainer], 3)
    known = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with evaluating(trainer.optimizer, trainer.model, trainer.workload):
        inside = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.workload.evaluate(trainer.model)
    after = trainer.model.state_dict()
    assert not torch.equal(inside["0.weight"], known["0.weight"])
    assert not torch.equal(inside["1.running_mean"], known["1.running_mean"])
    for name, value in known.items():
        torch.testing.assert_close(after[name], value)
    trainer.step()


# Missing packages


def test_a_missing_package_is_named(monkeypatch):
    for name in BLOCKED:
        for module in [key for key in sys.modules if key.split(".")[0] == BLOCKED[name]]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, BLOCKED[name], None)
        with pytest.raises(PackageMissingError, match=r'is not installed: pip install "secondorder\[peers\]"'):
            PEERS[name].build(nn.Linear(2, 2), "digits")
        assert name not in available()


@mock.patch.dict(PATHS, clear=True)
def test_missing_checkouts_and_invalid_options_are_named(tmp_path):
    model = nn.Linear(2, 2)
    for name in CHECKOUTS:
        with pytest.raises(ValueError, match=f"{name} needs a checkout of https://.*: --peer-path {name}=DIR"):
            PEERS[name].build(model, "digits")
        assert name not in available()
    for call, message in [
        (lambda: set_paths(["kfac"]), "NAME=DIR with NAME one of kfac_pytorch, .* got 'kfac'"),
        (lambda: set_paths([f"kfac_pytorch={tmp_path}"]), "lacks kfac/preconditioner.py, so it is no"),
        (
            lambda: PEERS["shampoo"].build(model, "digits", {"graft": "lion"}),
            "graft must be one of none, sgd, .* 'lion'",
        ),
        (
            lambda: PEERS["muon"].build(model, None, {"precision": "half"}),
            "precision must be auto, bfloat16 or float32, got 'half'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# Checkouts, which are replaced by code with the same interface

_KFAC = """
import importlib.metadata
__version__ = importlib.metadata.version("no-such-distribution")
class KFACPreconditioner:
    def __init__(self, model, lr, skip_layers, damping, kl_clip, factor_update_steps, inv_update_steps):
        self.model, self.lr, self.skipped, self.rates = model, lr, skip_layers, []
        self.kl_clip, self.clips = kl_clip, []
    def step(self):
        self.clips.append(self.kl_clip(len(self.rates)))
        self.rates.append(self.lr(len(self.rates)))
        for parameter in self.model.parameters():
            parameter.grad.zero_()
"""
_SHAMPOO = """
import torch
class AdamPreconditionerConfig:
    def __init__(self, beta2, epsilon): self.beta2 = beta2
class DistributedShampoo(torch.optim.SGD):
    def __init__(self, params, lr, betas, grafting_config, max_preconditioner_dim, precondition_frequency,
                 start_preconditioning_step):
        assert grafting_config.beta2 == betas[1]
        super().__init__(params, lr=lr)
"""
_MFAC = """
import torch
import torch.nn as nn
torch.backends.cudnn.allow_tf32 = False
class MFAC(torch.optim.SGD):
    def __init__(self, params, lr, momentum, damp, ngrads, moddev, optdev):
        super().__init__(params, lr=lr)
        root = torch.randn(5, 5, dtype=torch.float64)
        self.matrix = root @ root.t() + 5 * torch.eye(5, dtype=torch.float64)
        self.both = torch.lu(self.matrix, pivot=False)[0]
        self.twice = nn.parallel.parallel_apply([lambda x: 2 * x] * 2, [torch.ones(1), torch.zeros(1)])
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Return a function that writes code in place of a checkout, and registers its folder."""

    def make(name, *files):
        for file, text in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text, encoding="utf-8")
        for module in [key for key in sys.modules if key.split(".")[0] in {"kfac", "distributed_shampoo"}]:
            monkeypatch.delitem(sys.modules, module)
        PATHS.clear()
        set_paths([f"{name}={tmp_path}"])

    known = set(sys.modules)
    with mock.patch.dict(PATHS):
        yield make
    for module in set(sys.modules) - known:
        if module.split(".")[0] in {"kfac", "distributed_shampoo"}:
            del sys.modules[module]


def test_kfac_pytorch_preconditions_for_sgd_with_the_same_rate(checkout):
    files = ("kfac/__init__.py", ""), ("kfac/preconditioner.py", _KFAC), ("pyproject.toml", 'version = "1.2"\n')
    checkout("kfac_pytorch", *files)
    x, y, model = _regression()
    model.append(nn.MultiheadAttention(4, 2))
    optimizer = PEERS["kfac_pytorch"].build(model, "digits")
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    known = model[0].weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        (model[:2](x) - y).square().mean().backward()
        for parameter in model[2].parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()
    assert optimizer._beside[0].rates == pytest.approx([0.1, 0.05])
    assert optimizer._beside[0].clips == pytest.approx([0.001, 0.00025], rel=2e-3)  # follows the square of the rate
    assert optimizer._beside[0].skipped == [r"^2\.out_proj$"]
    assert torch.equal(model[0].weight, known)
    assert versions("kfac_pytorch")["kfac_pytorch"].startswith("1.2, sha256 ")
    assert "kfac_pytorch" in available()
    assert not any("kfac" in entry for entry in sys.path)


def test_distributed_shampoo_grafts_from_adam(checkout):
    name = "distributed_shampoo"
    checkout(name, (f"{name}/__init__.py", f"from {name}.{name} import *"), (f"{name}/{name}.py", _SHAMPOO))
    x, y, model = _regression()
    optimizer = PEERS[name].build(model, "digits")
    (model(x) - y).square().mean().backward()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [OURS["adamw"].recipes["digits"].settings["lr"]]


def test_functions_that_mfac_needs_are_replaced_on_the_cpu(checkout):
    checkout("ist_mfac", ("optim.py", _MFAC))
    known = torch.backends.cudnn.allow_tf32
    (part,) = PEERS["ist_mfac"].build(_regression()[2], "digits").parts
    assert torch.backends.cudnn.allow_tf32 == known
    lower = part.both.tril(-1) + torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(lower @ part.both.triu(), part.matrix)
    assert [float(value) for value in part.twice] == [2.0, 0.0]
    assert torch.lu is not None
    assert versions("ist_mfac")["ist_mfac"].startswith("sha256 ")


if "PEER_PATHS" in os.environ:  # NAME=DIR NAME=DIR ...: paths of checkouts, which tests cannot download

    @pytest.mark.parametrize("workload", ["digits", "chargpt"])
    @mock.patch.dict(PATHS, clear=True)
    def test_real_checkouts_take_steps(workload, data_dir):
        set_paths(os.environ["PEER_PATHS"].split())
        for name in list(PATHS):
            trainer = trainer_of(name, workload, data_dir)
            race([trainer], 3)
            assert not trainer.diverged
            assert optimizer_bytes(trainer.optimizer) > 0
