"""Who is counted: examples of a running scale, forwards that wait to be observed, tables shared by a batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secondorder
from secondorder import EKFAC, KFAC


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def x(n: int = 8) -> torch.Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


class Output:
    """No container that anybody knows."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.aux, self.kind = mlp(), nn.Linear(4, 2).double(), kind

    def forward(self, x: torch.Tensor):
        logits = self.net(x)
        return Output(logits) if self.kind == "own class" else (self.aux(x), logits)


def running(model: nn.Module) -> EKFAC:
    return EKFAC(model, lr=0.01, estimator="running", factor_update_steps=3, inv_update_steps=3)


@pytest.mark.parametrize("kind", ["own class", "unused head first"])
def test_a_running_scale_is_measured_on_every_step_whatever_the_model_returns(kind):
    model = Wrapped(kind)
    optimizer = running(model)
    for _ in range(6):
        optimizer.zero_grad()
        output = model(x())
        (output.logits if kind == "own class" else output[1]).square().mean().backward()
        optimizer.step()
    assert [optimizer.state[model.net[i].weight]["scale_updates"] for i in (0, 2)] == [6, 6]


def test_a_running_scale_is_measured_on_every_step_of_a_compiled_model():
    model = mlp()
    optimizer = running(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(6):
        optimizer.zero_grad()
        compiled(x()).square().mean().backward()
        optimizer.step()
    assert optimizer.state[model[0].weight]["scale_updates"] == 6


def test_a_gradient_of_inputs_counts_no_examples():
    def weight(disturbed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = mlp()
        optimizer = running(model)
        loss = model(x()).square().mean()
        if disturbed:
            z = x().requires_grad_()
            torch.autograd.grad(model(z).square().mean(), z)
        loss.backward()
        optimizer.step()
        return optimizer.state[model[0].weight]["scale_weight"]

    assert weight(True) == weight(False) == 8


def test_forwards_are_observed_though_only_what_was_made_of_their_outputs_is_kept():
    def factor(keep: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = mlp()
        optimizer = KFAC(model, fisher="exact", factor_update_steps=1)
        raw, made = [], []
        for _ in range(3):
            output = model(x(5))
            made.append(output * 2.0)
            if keep:
                raw.append(output)
            del output
        optimizer.observe(made, "gaussian")
        sum(part.square().sum() for part in made).backward()
        optimizer.step()
        return optimizer.state[model[0].weight]["factor_g"]

    assert torch.equal(factor(keep=False), factor(keep=True))


def test_a_head_without_a_term_takes_nothing_from_the_others():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = (nn.Linear(4, n).double() for n in (4, 3, 3))

        def forward(self, x: torch.Tensor):
            z = torch.tanh(self.body(x))
            return self.one(z), self.two(z)

    def factors(ignored: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Heads()
        optimizer = KFAC(model, fisher="exact")
        outputs = model(x(6))
        y = torch.randint(3, (6,))
        targets = [torch.full_like(y, -100) if i == ignored else y for i in range(2)]
        optimizer.observe(outputs, ["categorical", "categorical"], targets)
        F.cross_entropy(outputs[1 - ignored], y).backward()
        optimizer.step()
        return {name: optimizer.state[getattr(model, name).weight]["factor_g"] for name in ("body", "one", "two")}

    for ignored, used in ((0, "two"), (1, "one")):
        found = factors(ignored)
        assert all(value.isfinite().all() for value in found.values())
        assert found["body"].trace() > 0
        assert found[used].trace() > 0


def test_a_column_of_categories_is_no_table_of_positions():
    """As many columns as examples: each row of the table still belongs to an example."""

    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.rest = nn.Embedding(3, 2).double(), nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kind(x[:, 0].long()) + self.rest(x[:, 1:])

    model = Tabular()
    optimizer = EKFAC(model, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        rows = x(4)
        rows[:, 0] = torch.tensor([0.0, 1.0, 2.0, 0.0])
        model(rows).square().mean().backward()
        optimizer.step()
    assert optimizer.state[model.kind.weight]["scale_updates"] == 1


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_frames_of_videos_that_lie_time_first(approx):
    class Video(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.conv, self.norm, self.first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frames = self.norm(self.conv(x.flatten(0, 1)))
            return frames.unflatten(0, x.shape[:2]).mean(1 - self.first).flatten(1)

    clips = torch.randn(3, 5, 2, 4, 4, dtype=torch.float64)  # [N, T, …]
    found = []
    for first in (0, 1):
        torch.manual_seed(0)
        model = Video(first).double()
        optimizer = secondorder.EKFAC(model, lr=0.0, approx=approx, batch_dim=first)
        for _ in range(2):
            optimizer.zero_grad()
            model(clips if first == 0 else clips.transpose(0, 1)).square().sum(1).mean().backward()
            optimizer.step()
        found.append([optimizer.dense_curvature(name) for name in ("conv", "norm")])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)
