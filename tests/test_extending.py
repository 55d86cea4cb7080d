"""Compare the examples of docs/extending.md with independent computations of the same results."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from secondorder import EKFAC, KFAC, CommOpt, HyLo, MemOpt, SecondOrderOptimizer, options
from secondorder.methods.layers import LayerRecipe
from tests.support.building import built
from tests.support.code_blocks import DOCS, blocks, examples, run
from tests.support.kfac import labels, noise
from tests.support.models import seeded_build
from tests.support.oracles.kfac import expected_factors, kron, layer_gradient, layer_values, solve_pi
from tests.support.pool import Pool
from tests.support.quadratic import flat

PAGE = DOCS / "extending.md"
EXAMPLES = ["DiagonalFisher", "HalfKFAC", "NewtonKFAC", "PerNode", "MultipliedLinearAdapter"]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run(PAGE, set())


def _classes() -> dict[str, Any]:
    """Return the classes of the page without running the examples of their use."""
    names: dict[str, Any] = {"__name__": "extending"}
    for block in examples(PAGE):
        if "\nclass " in block.code:
            exec(block.code, names)
    return names


def _batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(n, 3, 6, 6, seed=seed), labels(n, 5, seed)


def _net() -> nn.Module:
    return seeded_build(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)))


def _train(model: nn.Module, opt: Any, steps: range, rank: int = 0, world: int = 1) -> Tensor:
    """Return the parameters after steps on this rank's part of each batch."""
    wrapped = DistributedDataParallel(model) if world > 1 else model
    for step in steps:
        x, y = (part.chunk(world)[rank] for part in _batch(8, step))
        opt.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        opt.step()
    return flat(model.parameters())


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients of single examples by parameter, ``[N, …]``; the hooks of an optimizer ignore transforms."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))(weights, x, y)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_short_and_uses_public_names(name: str) -> None:
    (code,) = (block.code for block in examples(PAGE) if f"class {name}(" in block.code)
    assert len(code.splitlines()) < 60  # as the page says
    assert max(map(len, code.splitlines())) <= 120
    assert not (found := re.findall(r"(?<![\w}])_(?!_)\w*", code)), found
    assert not [block for block in blocks(PAGE) if block.marks]  # all blocks run


# ---------------------------------------------------------------------- the method
def test_the_method_has_the_squares_of_single_gradients(page: dict[str, Any]) -> None:
    model, (x, y) = _net(), _batch(16)
    opt = page["DiagonalFisher"](model, lr=0.5, damping=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    single = _gradients(model, x, y)
    cross_entropy(model(x), y).backward()
    opt.step()
    for layer in ("0", "3"):
        matrix = torch.cat([single[f"{layer}.weight"].flatten(2), single[f"{layer}.bias"][..., None]], -1)
        torch.testing.assert_close(opt.dense_curvature(layer), matrix.square().mean(0).flatten().diag())
    for name, p in model.named_parameters():
        expected = before[name] - 0.5 * single[name].mean(0) / (single[name].square().mean(0) + 0.01)
        torch.testing.assert_close(p.detach(), expected)
    opt.close()


#: Keywords of the examples that are methods. With them, estimates and inverses are updated in different steps.
KRONECKER = {"damping": 0.1, "factor_update_steps": 1, "inv_update_steps": 2}
METHODS = {"DiagonalFisher": {"damping": 0.01, "inv_update_steps": 2}, "HalfKFAC": KRONECKER, "NewtonKFAC": KRONECKER}


def _trained(cls: Any, rank: int = 0, world: int = 1, **chosen: Any) -> tuple[Tensor, int]:
    """Return the parameters after some steps, and the bytes of the estimate."""
    model = _net()
    opt = built(cls, model, lr=0.05, momentum=0.9, **chosen)
    found = _train(model, opt, range(4), rank, world)
    held = opt.memory_usage()["factors"]
    opt.close()
    return found, held


def _method_on_ranks(rank: int, world: int, name: str, strategy: Any) -> tuple[list[float], int]:
    found, held = _trained(_classes()[name], rank, world, **METHODS[name], comm=strategy())
    return found.tolist(), held


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("DiagonalFisher", CommOpt), ("DiagonalFisher", MemOpt), ("HalfKFAC", MemOpt), ("NewtonKFAC", MemOpt)],
)
def test_methods_work_on_ranks(page: dict[str, Any], pool: Pool, name: str, strategy: Any) -> None:
    alone, held = _trained(page[name], **METHODS[name])
    tolerance = {"rtol": 0.0, "atol": 1e-3} if name == "HalfKFAC" else {}  # its factors are rounded to half precision
    for found, on_rank in pool.run(_method_on_ranks, name, strategy, world=2):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), alone, **tolerance)
        assert (on_rank < held) == (strategy is MemOpt)  # with MemOpt, only the owner stores the estimate


@pytest.mark.parametrize("name", METHODS)
def test_checkpoints_and_copies_continue_exactly(page: dict[str, Any], name: str) -> None:
    first, second = _net(), _net()
    opt = page[name](first, momentum=0.9, **METHODS[name])
    _train(first, opt, range(3))
    second.load_state_dict(first.state_dict())
    resumed = page[name](second, momentum=0.9, **METHODS[name])
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    third, copied = copy.deepcopy((first, opt))
    copied.attach(third)
    ends = []
    for model, one in ((first, opt), (second, resumed), (third, copied)):
        ends.append(_train(model, one, range(3, 6)))
        one.close()
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_a_signature_may_leave_out_what_is_optional(page: dict[str, Any]) -> None:
    preconditioner = page["DiagonalPreconditioner"]

    class Least(SecondOrderOptimizer):
        checks = page["DiagonalFisher"].checks

        def __init__(
            self, params: Any, lr: float, damping: float, factor_decay: float, factor_update_steps: int = 1
        ) -> None:
            given = {**locals(), "inv_update_steps": 1}
            super().__init__(given, LayerRecipe(preconditioner))

    ends = []
    for cls in (Least, page["DiagonalFisher"]):
        opt = cls(model := _net(), lr=0.1, damping=0.01, factor_decay=0.9)
        ends.append(_train(model, opt, range(2)))
        assert opt.plan(4, batch_size=8)
        opt.close()
    assert torch.equal(*ends)


def test_the_common_options_have_defaults() -> None:
    assert options.DEFAULTS.keys() == options.COMMON.keys() - {"lr"}
    signature = KFAC(nn.Linear(2, 2), lr=0.1).defaults
    for name, value in options.DEFAULTS.items():
        if name not in ("momentum", "fallback", "betas"):  # KFAC has other defaults, and lists betas with graft="adam"
            assert signature[name] == value, name


# ---------------------------------------------------------------------- the storage and the inverse
def test_the_storage_rounds_factors(page: dict[str, Any]) -> None:
    model, (x, y) = _net(), _batch(16)
    a, g = expected_factors(model, x, y, cross_entropy)["3"]
    opt = page["HalfKFAC"](model, **KRONECKER)
    cross_entropy(model(x), y).backward()
    opt.step()
    expected = kron(g, a)
    assert 0 < (opt.dense_curvature("3") - expected).abs().max() < 2 * 2**-11 * expected.abs().max()
    held, plan = opt.memory_usage()["factors"], opt.plan(4, batch_size=16)
    assert held == 2 * (28**2 + 4**2 + 65**2 + 5**2) + 4 * 8  # and four scales
    assert plan.ranks[0].stored["factors"] == held
    opt.close()


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_the_storage_converts_checkpoints(page: dict[str, Any], storage: str) -> None:
    first, second = _net(), _net()
    one = built(KFAC, first, **KRONECKER, factor_storage=storage)
    _train(first, one, range(3))
    other = page["HalfKFAC"](second, **KRONECKER)
    other.load_state_dict(one.state_dict())
    expected = one.dense_curvature("3")
    torch.testing.assert_close(other.dense_curvature("3"), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    one.close()
    other.close()


def test_the_inverse_solves_the_damped_system(page: dict[str, Any]) -> None:
    model, (x, y) = _net(), _batch(16)
    a, g = expected_factors(model, x, y, cross_entropy)["3"]
    before = layer_values(model[3])
    opt = page["NewtonKFAC"](model, lr=1.0, momentum=0.0, kl_clip=None, **KRONECKER)
    cross_entropy(model(x), y).backward()
    expected = solve_pi(g, a, layer_gradient(model[3]), 0.1)
    opt.step()
    torch.testing.assert_close(before - layer_values(model[3]), expected)
    assert opt.plan(4, batch_size=16)
    opt.close()


@pytest.mark.parametrize(
    "chosen", [{}, {"overlap": True}, {"factor_storage": "packed"}, {"max_factor_dim": 30}], ids=str
)
def test_the_inverse_matches_cholesky(page: dict[str, Any], chosen: dict[str, Any]) -> None:
    ends = []
    for cls, how in ((page["NewtonKFAC"], {}), (KFAC, {"inverse_method": "cholesky"})):
        opt = built(cls, model := _net(), **KRONECKER, **chosen, **how)
        ends.append(_train(model, opt, range(5)))
        opt.close()
    torch.testing.assert_close(*ends)


# ---------------------------------------------------------------------- the strategy
def _strategy_on_ranks(rank: int, world: int) -> tuple[list[float], list[int], list[int]]:
    comm = _classes()["PerNode"](ranks_per_node=2)
    found, _ = _trained(KFAC, rank, world, **KRONECKER, comm=comm)
    assert repr(comm) == "PerNode(ranks_per_node=2)"
    return found.tolist(), list(comm.grid.row_of(rank)), [comm.owner(i) for i in range(2)]


def test_the_strategy_matches_one_process(pool: Pool) -> None:
    alone, _ = _trained(KFAC, **KRONECKER)
    for rank, (found, row, owners) in enumerate(pool.run(_strategy_on_ranks, world=4)):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), alone)
        assert row == [rank // 2 * 2, rank // 2 * 2 + 1]  # directions stay inside a node
        assert sorted(owners) == [1, 3]  # the first of each node owns nothing


# ---------------------------------------------------------------------- the layer
class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_the_layer_matches_a_linear_layer_and_a_product(page: dict[str, Any], method: Any) -> None:
    """The batch consists of sequences, so that an example has several rows."""
    Multiplied = page["MultipliedLinear"]
    mine = seeded_build(lambda: nn.Sequential(Multiplied(6, 5, 0.5), nn.Tanh(), Multiplied(5, 3, 2.0)))
    theirs = nn.Sequential(nn.Linear(6, 5), Times(0.5), nn.Tanh(), nn.Linear(5, 3), Times(2.0)).double()
    for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
        p.data.copy_(q.data)
    x, y = noise(8, 2, 6), labels(8, 3)
    found = []
    for model, layer in ((mine, "2"), (theirs, "3")):
        opt = method(model, lr=0.05, damping=0.1)
        for _ in range(3):
            opt.zero_grad()
            cross_entropy(model(x).mean(1), y).backward()
            opt.step()
        found.append((opt.dense_curvature(layer), *model.parameters()))
        opt.close()
    torch.testing.assert_close(*found)
