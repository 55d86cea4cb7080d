"""Strategies that estimate from some ranks' examples alone, against a plain loop over that data: scale and steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import secondorder
from secondorder import ChiefOnly, LocalFactors
from tests.support.grid import each
from tests.support.pool import Pool

LR, DAMPING, DECAY, STEPS, BATCH = 0.1, 0.05, 0.9, 6, 12


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).double()


def _batch(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def _shard(x: Tensor, rank: int, world: int) -> Tensor:
    return x.chunk(world)[rank]


def _train(rank: int, world: int, name: str, inverse_method: str) -> tuple[list[float], list[int]]:
    strategies = {
        "local": LocalFactors,
        "chief": lambda: ChiefOnly(root=1, statistics="chief"),
        "chief inverses": lambda: ChiefOnly(root=1, deliver="inverses", statistics="chief"),
    }
    model = _net()
    wrapped = DistributedDataParallel(model)
    optimizer = secondorder.KFAC(
        model, lr=LR, momentum=0.0, damping=DAMPING, factor_decay=DECAY, factor_update_steps=1, inv_update_steps=2,
        kl_clip=None, inverse_method=inverse_method, comm=strategies[name](),
    )  # fmt: skip
    for t in range(STEPS):
        x, y = (_shard(v, rank, world) for v in _batch(t))
        optimizer.zero_grad()
        (wrapped(x) - y).square().sum(1).mean().backward()
        optimizer.step()
    owners = [optimizer.comm.owner(block.index) for block in optimizer.blocks.values()]
    sent = optimizer.comm.collectives.counter.bytes_by_stage()
    assert "statistics" not in sent
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), owners


def _naive(owners: list[int], world: int, inverse_method: str) -> Tensor:
    """The same training in plain lists: factors of each layer from its owner's examples by per-example gradients."""
    model = _net()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    running: list[tuple[Tensor, Tensor]] = []
    weights, inverses = [0.0] * len(layers), [Tensor()] * len(layers)
    for t in range(STEPS):
        x, y = _batch(t)
        for i, layer in enumerate(layers):
            own_x, own_y = (_shard(v, owners[i], world) for v in (x, y))
            a, g = _second_moments(model, layer, own_x, own_y)
            weights[i] = DECAY * weights[i] + len(own_x)
            share = len(own_x) / weights[i]
            if t == 0:
                running.append((a, g))
            else:
                running[i] = running[i][0].lerp(a, share), running[i][1].lerp(g, share)
            if t % 2 == 0:
                inverses[i] = _damped_inverse(*running[i], inverse_method)
        model.zero_grad()
        (model(x) - y).square().sum(1).mean().backward()
        with torch.no_grad():
            for layer, inverse in zip(layers, inverses, strict=True):
                params = [p for p in (layer.weight, layer.bias) if p is not None]
                grad = torch.cat([p.grad.view(len(layer.weight), -1) for p in params if p.grad is not None], 1)
                step = (inverse @ grad.flatten()).view_as(grad)
                layer.weight -= LR * step[:, : layer.in_features]
                if layer.bias is not None:
                    layer.bias -= LR * step[:, -1]
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _second_moments(model: nn.Sequential, layer: nn.Linear, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means over examples of a aᵀ and g gᵀ, one example at a time."""
    seen: dict[str, Tensor] = {}

    def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["a"], seen["z"] = inputs[0].detach()[0], output

    handle = layer.register_forward_hook(note)
    a_sum, g_sum = 0, 0
    for i in range(len(x)):
        loss = (model(x[i : i + 1]) - y[i : i + 1]).square().sum()
        (g,) = torch.autograd.grad(loss, seen["z"])
        a = seen["a"] if layer.bias is None else torch.cat([seen["a"], torch.ones(1, dtype=torch.float64)])
        a_sum, g_sum = a_sum + torch.outer(a, a), g_sum + torch.outer(g[0], g[0])
    handle.remove()
    return a_sum / len(x), g_sum / len(x)  # type: ignore[return-value]


def _damped_inverse(a: Tensor, g: Tensor, inverse_method: str) -> Tensor:
    if inverse_method == "eigen":
        whole = torch.kron(g, a)
        return torch.linalg.inv(whole + DAMPING * torch.eye(len(whole), dtype=torch.float64))
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    a = a + pi * DAMPING**0.5 * torch.eye(len(a), dtype=torch.float64)
    g = g + DAMPING**0.5 / pi * torch.eye(len(g), dtype=torch.float64)
    return torch.kron(torch.linalg.inv(g), torch.linalg.inv(a))


@each(
    inverse_method=["eigen", "cholesky"],
    where={
        "local-2": ("local", 2),
        "local-3": ("local", 3),
        "chief-2": ("chief", 2),
        "inverses-3": ("chief inverses", 3),
    },
)
def test_owners_estimate_from_their_own_examples(pool: Pool, inverse_method: str, where: tuple[str, int]) -> None:
    name, world = where
    found = pool.run(_train, name, inverse_method, world=world)
    owners = found[0][1]
    wanted = _naive(owners, world, inverse_method)
    for params, others in found:
        assert others == owners
        assert params == found[0][0]
        torch.testing.assert_close(torch.tensor(params, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-11)
    assert set(owners) == ({1} if name.startswith("chief") else set(range(world)))
