"""The examples of docs/extending.md, each against something that computes the same in another way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from secondorder import EKFAC, KFAC, CommOpt, HyLo, MemOpt, options
from tests.code_blocks import DOCS, blocks, examples, run
from tests.distributed.pool import Pool

PAGE = DOCS / "extending.md"
CLASSES = {"DiagonalFisher": 60, "PerNode": 60, "MultipliedLinearAdapter": 60}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run(PAGE, set())


def _classes() -> dict[str, Any]:
    """The classes of the page, without the examples of their use: what a rank needs."""
    names: dict[str, Any] = {"__name__": "extending"}
    for block in examples(PAGE):
        if "\nclass " in block.code:
            exec(block.code, names)
    return names


def _batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=generator).double(), torch.randint(5, (n,), generator=generator)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)).double()


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of single examples, by parameter, ``[N, …]``."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    return vmap(grad(loss), (None, 0, 0))(weights, x, y)


@pytest.mark.parametrize("name", ["DiagonalFisher", "PerNode", "MultipliedLinearAdapter"])
def test_each_example_is_shorter_than_sixty_lines(name: str) -> None:
    (code,) = (block.code for block in examples(PAGE) if f"class {name}(" in block.code)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) < 60, len(lines)
    assert max(map(len, lines)) <= 120
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


def _trained(cls: Any, rank: int, world: int, **chosen: Any) -> tuple[Tensor, int]:
    model = _net()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    opt = cls(model, lr=0.05, momentum=0.9, **chosen)
    for step in range(4):
        x, y = (part.chunk(world)[rank] for part in _batch(8, step))
        opt.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        opt.step()
    held = opt.memory_usage()["factors"]
    opt.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), held


def _method_on_ranks(rank: int, world: int, strategy: str) -> tuple[list[float], int]:
    cls = _classes()["DiagonalFisher"]
    found, held = _trained(
        cls, rank, world, damping=0.01, inv_update_steps=2, comm={"c": CommOpt, "m": MemOpt}[strategy]()
    )
    return found.tolist(), held


@pytest.mark.parametrize("strategy", ["c", "m"])
def test_the_method_works_with_every_strategy(page: dict[str, Any], pool: Pool, strategy: str) -> None:
    alone, held = _trained(page["DiagonalFisher"], 0, 1, damping=0.01, inv_update_steps=2)
    for found, on_rank in pool.run(_method_on_ranks, strategy, world=2):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), alone)
        assert (on_rank < held) == (strategy == "m")  # the estimate is on its owner alone


def test_the_method_resumes_exactly(page: dict[str, Any]) -> None:
    def part(model: nn.Module, opt: Any, steps: range) -> None:
        for step in steps:
            x, y = _batch(8, step)
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()

    first, second = _net(), _net()
    opt = page["DiagonalFisher"](first, momentum=0.9)
    part(first, opt, range(3))
    saved = opt.state_dict()
    second.load_state_dict(first.state_dict())
    resumed = page["DiagonalFisher"](second, momentum=0.9)
    resumed.load_state_dict(saved)
    for model, one in ((first, opt), (second, resumed)):
        part(model, one, range(3, 6))
        one.close()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_common_options_have_defaults() -> None:
    assert options.DEFAULTS.keys() == options.COMMON.keys() - {"lr"}
    signature = KFAC(nn.Linear(2, 2)).defaults
    for name, value in options.DEFAULTS.items():
        if name not in ("momentum", "fallback", "betas"):  # KFAC has its own; betas stand there with graft="adam"
            assert signature[name] == value, name


# ---------------------------------------------------------------------- the strategy
def _strategy_on_ranks(rank: int, world: int) -> tuple[list[float], list[int], list[int]]:
    comm = _classes()["PerNode"](ranks_per_node=2)
    found, _ = _trained(KFAC, rank, world, damping=0.1, factor_update_steps=1, inv_update_steps=2, comm=comm)
    return found.tolist(), list(comm.grid.row_of(rank)), [comm.owner(i) for i in range(2)]


def test_the_strategy_does_what_one_process_does(pool: Pool) -> None:
    alone, _ = _trained(KFAC, 0, 1, damping=0.1, factor_update_steps=1, inv_update_steps=2)
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


def test_the_rows_of_the_adapter_are_its_gradient(page: dict[str, Any]) -> None:
    layer = page["MultipliedLinear"](4, 3, 1.7).double()
    adapter = page["MultipliedLinearAdapter"](layer, has_weight=True, has_bias=True)
    x, g = torch.randn(5, 2, 4).double(), torch.randn(5, 2, 3).double()
    layer(x).backward(g)
    (a,) = adapter.input_rows(x)
    rows = adapter.output_rows(g, x, 5)
    with_one = torch.cat([a, torch.ones(len(a), 1)], 1)
    torch.testing.assert_close(rows.mT @ with_one, adapter.to_matrix(layer.weight.grad, layer.bias.grad))


@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_the_layer_is_a_linear_one_and_a_product(page: dict[str, Any], method: Any) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(page["MultipliedLinear"](6, 5, 0.5), nn.Tanh(), page["MultipliedLinear"](5, 3, 2.0)).double()
    theirs = nn.Sequential(nn.Linear(6, 5), Times(0.5), nn.Tanh(), nn.Linear(5, 3), Times(2.0)).double()
    for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
        p.data.copy_(q.data)
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    curvatures = []
    for model, layer in ((mine, "2"), (theirs, "3")):
        opt = method(model, lr=0.05, damping=0.1)
        for _ in range(3):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
        curvatures.append(opt.dense_curvature(layer))
        opt.close()
    torch.testing.assert_close(*curvatures)
    for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(p, q)
