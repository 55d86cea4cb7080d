"""What every workload of the benchmarks promises.

The workloads of :data:`WITH_BERT` need Transformers, so they run in the environment of ``make test-integrations``.
"""

import json
import math
import warnings

import pytest
import torch

from benchmarks import runner
from benchmarks.cli import main
from benchmarks.compare.runs import find
from benchmarks.runner import race
from benchmarks.workloads import WORKLOADS, make_workload
from secondorder import HyLo
from secondorder.capture.fisher.likelihood import resolve

WITH_BERT = ("bert_qa", "glue")
WITHOUT_BERT = tuple(name for name in WORKLOADS if name not in WITH_BERT)
NEED_NO_DATA = ("digits", "poisson")  # the former is part of scikit-learn, and the latter is a formula


class Promises:
    """Tests that take the ``name`` of a workload."""

    def test_only_the_seed_determines_weights_and_batches(self, name, data_dir):
        workload, before = make_workload(name, data_dir, "smoke"), torch.get_rng_state()
        (model, batch), (same, same_batch), (other, other_batch) = (
            (workload.build_model(seed), next(workload.batches(seed))) for seed in (0, 0, 1)
        )
        weights = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, same, other)]
        assert weights[0].equal(weights[1])
        assert not weights[0].equal(weights[2])
        assert batch[0].equal(same_batch[0])
        assert batch[1].equal(same_batch[1])
        assert not batch[0].equal(other_batch[0])
        assert torch.get_rng_state().equal(before)
        assert workload.examples >= workload.batch_size

    def test_an_evaluation_is_a_number_and_leaves_the_mode(self, name, data_dir):
        """Other tests take steps, which lower the loss."""
        workload = make_workload(name, data_dir, "smoke")
        model = workload.build_model(0)
        for everything in (False, True):
            found = workload.evaluate(model, everything=everything)
            assert math.isfinite(found)
            assert model.training
            if "accuracy" in workload.metric or "Dice" in workload.metric:
                assert 0 <= found <= 1

    def test_the_likelihood_is_that_of_the_loss(self, name, data_dir):
        workload = make_workload(name, data_dir, "smoke", batch_size=3)
        model, batch = workload.build_model(0), next(workload.batches(0))
        check_likelihood(workload, model, batch)


def check_likelihood(workload, model, batch):
    """The loss is a mean over the terms of the likelihood, whose curvature is the Hessian of their sum."""
    outputs, targets = workload.outputs(model, batch).detach().double(), workload.targets(batch)
    targets = targets.double() if targets.is_floating_point() else targets
    kind = resolve(workload.likelihood)
    tangent = torch.randn_like(outputs)

    def loss(x):
        return workload.criterion(x, targets) * kind.terms(outputs, targets)

    _, product = torch.autograd.functional.hvp(loss, outputs, tangent)
    torch.testing.assert_close(kind.hessian_product(outputs, targets, tangent), product)
    assert workload.loss(model, batch).item() == pytest.approx(workload.criterion(outputs, targets).item(), rel=1e-5)


def check_padding(workload, pad):
    """Padding that the function ``pad`` adds to a batch changes neither the loss nor the gradients."""
    model, batch = workload.build_model(0).double(), next(workload.batches(0))
    found = []
    for inputs in (batch, pad(*batch)):
        loss = workload.loss(model, inputs)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found)


def check_parts(workload, monkeypatch, module, name, size):
    """An evaluation in parts of another size has the same result."""
    model = workload.build_model(0)
    whole, quality = workload.evaluate(model, everything=True), workload.quality(model)
    monkeypatch.setattr(module, name, size)
    assert workload.evaluate(model, everything=True) == pytest.approx(whole)
    assert workload.quality(model) == quality


def check_coverage(method, workload):
    """Every parameter has curvature, and steps lower the loss."""
    model = workload.build_model(0)
    keywords = {"factor_update_steps": 1, "inv_update_steps": 2}
    if method is HyLo:  # its absolute damping hides the curvature of some workloads, which causes a warning
        keywords = {"update_steps": 2, "damping": 0.1, "damping_mode": "relative"}
    optimizer = method(model, lr=0.01, graft="adam", **keywords)
    assert "fallback" not in optimizer.describe()
    batch, losses = next(workload.batches(0)), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as for a layer without captured statistics
        for _ in range(5):
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    refreshes = [state["refreshes"] for state in optimizer.state.values() if "refreshes" in state]
    assert set(refreshes) == {3}


def train(workload, steps, lr):
    """Return a model after some steps of AdamW, and how much they have improved its metrics."""
    model = workload.build_model(0)
    before = workload.quality(model)
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=lr), workload.batches(0)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
    return model, {name: value - before[name] for name, value in workload.quality(model).items()}


def trainer_of(name, workload, data_dir=None, **changes):
    """A run of an optimizer of this package or of another one, with changes to its recipe."""
    method = find(name)
    return runner.trainer_of(method, make_workload(workload, data_dir, "smoke"), method.settings(workload, changes))


def check_recipe(name, workload, data_dir):
    trainer = trainer_of(name, workload, data_dir)
    race([trainer], 3)
    assert not trainer.diverged
    assert trainer.optimizer.diagnostics()["skipped_steps"] == 0
    assert trainer.optimizer.diagnostics()["refresh_failures"] == 0


def check_made_up_data(workload, folder, capsys):
    """``compare`` in a folder without data uses random data and reports this."""
    words = ["compare", "--workload", workload, "--size", "smoke", "--steps", "3"]
    assert main([*words, "--optimizers", "sgd", "muon", "kfac", "--out-dir", "out"]) == 0
    found = json.loads((folder / "out" / f"compare-{workload}-smoke.json").read_text(encoding="utf-8"))
    finals = [run for run in found["runs"] if run["phase"] == "final"]
    assert [(run["optimizer"], run["taken"], run["failed"]) for run in finals] == [
        (name, 3, None) for name in ("sgd", "muon", "kfac")
    ]
    made_up = workload not in NEED_NO_DATA
    page = (folder / "out" / "report.md").read_text(encoding="utf-8")
    reported = "made-up data" in capsys.readouterr().out
    assert ("generated at random" in page) == reported == found["made_up_data"] == made_up
    assert str(folder) not in page
