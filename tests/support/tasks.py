"""Tiny deterministic models and batches, and the functions that all contract tests share.

Every model has covered layers (Linear, Conv2d, Embedding, LayerNorm) and one `Scale`, whose bare parameter no layer
method covers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
CLASSES = 3
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm)
TOKENS, WIDTH, LENGTH = 7, 4, 3


class Scale(nn.Module):
    """A learned gain per feature: a parameter that belongs to no layer with a block.

    With exactly one argument of ``forward``, it would be tested for a normalization, which takes longer than a test.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, width))

    def forward(self, *inputs: Tensor) -> Tensor:
        (features,) = inputs
        return features * self.gain


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.scale = Scale(4)
        self.second = nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.scale(torch.tanh(self.first(inputs))))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(3, 4, 2, stride=2, bias=False)
        self.scale = Scale(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.second(self.relu(self.first(inputs))).mean((-2, -1))
        return self.head(self.scale(features))


class Attention(nn.Module):
    """One block of causal self-attention over tokens, from plain Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = Scale(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).tril()
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~mask, -torch.inf)
        hidden = hidden + self.out(scores.softmax(-1) @ v)
        return self.head(self.scale(hidden))


def _noise(*shape: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        inputs = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(CLASSES, shape[:1], generator=generator)

    return draw


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(TOKENS, (4, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Task:
    """A model, and a batch and a loss for every step."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.build().to(dtype)

    def batch(self, step: int, dtype: torch.dtype = torch.float64) -> Batch:
        inputs, targets = self.draw(torch.Generator().manual_seed(1000 + step))
        return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets

    def loss(self, model: nn.Module, step: int) -> Tensor:
        inputs, targets = self.batch(step, next(model.parameters()).dtype)
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


MLP = Task("mlp", Mlp, _noise(6, 5))
CNN = Task("cnn", Cnn, _noise(4, 2, 4, 4))
TRANSFORMER = Task("transformer", Attention, _tokens)
TASKS = (MLP, CNN, TRANSFORMER)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, step: int) -> Tensor:
    """Fill `.grad` with the gradients of the batch of `step`, and return the loss."""
    optimizer.zero_grad()
    loss = task.loss(model, step)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        backward(model, optimizer, task, step)
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def put_back(model: nn.Module, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])


def displacements(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, steps: int, between: Callable[[], Any] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the change of each step, where every step starts from the initial parameters.

    In this way, two optimizers with different update rules see the same gradients and statistics in every step.
    """
    start = values(model)
    for step in range(steps):
        train(model, optimizer, task, 1, start=step)
        yield {name: value - start[name] for name, value in values(model).items()}
        put_back(model, start)
        if between is not None:
            between()


def covered_layers(model: nn.Module) -> dict[str, list[str]]:
    """Parameter names of every layer with a block, by layer name."""
    return {
        name: [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        for name, module in model.named_modules()
        if isinstance(module, LAYERS)
    }


def covered_names(model: nn.Module) -> set[str]:
    return {name for names in covered_layers(model).values() for name in names}


def block_vector(vectors: dict[str, Tensor], names: list[str]) -> Tensor:
    """Weight and bias of one layer as one vector."""
    return torch.cat([vectors[name].flatten() for name in names])


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def assert_identical(actual: Any, expected: Any, path: str = "") -> None:
    """Bitwise equal, also in type, dtype and shape, through dicts and sequences (a NaN equals a NaN)."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{path}: {type(actual)} is no tensor"
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{path}: {actual.keys() ^ expected.keys()}"
        for key, value in expected.items():
            assert_identical(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_identical(actual[index], value, f"{path}[{index}]")
    else:
        assert type(actual) is type(expected), f"{path}: {type(actual)} is not {type(expected)}"
        assert actual == expected, f"{path}: {actual} != {expected}"


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-12, atol: float = 1e-14
) -> None:
    """Tensors of the same names, dtypes and shapes are close."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        texts = partial("{}: {}".format, name)
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=texts)


#: For changes of the parameters that are computed in a different order.
assert_same_moves = partial(assert_all_close, rtol=1e-9, atol=1e-13)


def assert_changed(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Every parameter has moved and is finite."""
    for name, value in values(model).items():
        assert value.isfinite().all(), name
        assert not torch.equal(value, before[name]), name


def moved_names(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Names of the parameters that have changed."""
    return {name for name, value in values(model).items() if not torch.equal(value, before[name])}


class Shadow:
    """One of torch's own optimizers on copies of some parameters, with the same gradients."""

    def __init__(self, parameters: list[nn.Parameter], build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        self.originals = parameters
        self.copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        self.optimizer = build(self.copies)

    def follow(self) -> None:
        """Continue from the current values of the parameters."""
        with torch.no_grad():
            for original, mine in zip(self.originals, self.copies, strict=True):
                mine.copy_(original)

    def step(self) -> None:
        """Take the step; call this between backward and the step of the optimizer under test."""
        for original, mine in zip(self.originals, self.copies, strict=True):
            mine.grad = None if original.grad is None else original.grad.clone()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [mine.detach().clone() for mine in self.copies]

    def assert_identical(self) -> None:
        assert_identical([p.detach() for p in self.originals], self.values())
