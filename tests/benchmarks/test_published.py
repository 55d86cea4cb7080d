"""Published recipes: their keywords exist, and their rules give the rates of the published programs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.commands.train import Train
from benchmarks.recipes import METHODS
from benchmarks.recipes.published import PUBLISHED, falling
from benchmarks.recipes.types import factor

CASES = [(method, workload) for method, recipes in PUBLISHED.items() for workload in recipes]


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("method", PUBLISHED)
def test_keywords_of_a_recipe_build_an_optimizer_that_steps(method):
    for recipe in PUBLISHED[method].values():
        _step(method, dict(recipe.settings))


def _step(method, settings):
    model = _Net()
    if "window_size" in settings:
        settings["window_size"] = 4  # a long window is slow
    if settings.get("likelihood") == "bernoulli":
        settings["likelihood"] = "categorical"
    optimizer = METHODS[method].build(model, None, settings)
    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        outputs = model(x)
        if settings.get("fisher") == "mc":
            optimizer.observe(outputs, "categorical")
        loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        return loss, outputs

    optimizer.step(closure)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()


def test_rules_give_the_rates_of_the_programs():
    for method, workload, ranks, rate in [
        ("kfac", "resnet50", (1, 32, 256), 0.0125),  # KAISA multiplies its rate by the number of ranks
        ("kfac", "resnet50", (64, 32, 256), 0.0125 * 64),
        ("kfac", "resnet50", (8, 128, 256), 0.4),
        ("kfac", "resnet110", (1, 128, 128), 0.1),  # DP-KFAC was published for four ranks
        ("kfac", "resnet110", (16, 128, 128), 1.6),
        ("sgd", "resnet50", (256, 32, 256), 3.2),  # Goyal et al.: 8,192 images
        ("sgd", "resnet50", (1, 256, 256), 0.1),
        ("adamw", "gpt2_small", (2, 60, 480), 3e-4),  # the square root
        ("mfac", "resnet20", (4, 128, 128), 2e-3),
        ("kfac", "autoencoder", (4, 1000, 1000), 1.0),
    ]:
        assert PUBLISHED[method][workload].at(*ranks).settings["lr"] == pytest.approx(rate)
    assert PUBLISHED["kfac"]["resnet50"].at(8, 128, 256).settings["weight_decay"] == 5e-5


def test_rates_decay_at_the_epochs_of_the_programs():
    schedule = falling(100, 35, 75, 90, warmup=5, gamma=0.3)
    found = [factor(schedule, epoch * 10, 1000) for epoch in (0, 2, 5, 34, 35, 74, 75, 90, 99)]
    assert found == pytest.approx([1 / 50, 21 / 50, 1, 1, 0.3, 0.3, 0.09, 0.027, 0.027])
    assert falling(164, 82, 123).milestones == (0.5, 0.75)


def test_the_size_paper_uses_published_recipes():
    recipe = METHODS["kfac"].recipe("resnet32", "paper")
    assert recipe is PUBLISHED["kfac"]["resnet32"]
    assert METHODS["sgd"].recipe("digits", "paper") is METHODS["sgd"].recipe("digits")


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_command_uses_published_recipes_without_scaling(method, tmp_path):
    for workload, recipe in PUBLISHED[method].items():
        _plan(method, workload, recipe, tmp_path)


def _plan(method, workload, recipe, tmp_path):
    words = Train(data_dir=tmp_path, optimizer=method, workload=workload, size="paper", print_recipe=True)
    for chosen in (words, replace(words, scale_recipe=True)):
        plan = chosen.plan(recipe.world)
        assert plan.recipe.settings == recipe.settings
        assert plan.workload.batch_size == recipe.world * (recipe.batch_size or plan.own_batch_size)
        assert all(getattr(plan.workload, key) == value for key, value in recipe.workload.items())
    assert replace(words, world=2 * recipe.world).show_recipe() == 0
