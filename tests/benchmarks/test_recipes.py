"""Every recipe builds an optimizer that trains, and plain values become keywords of its constructor."""

import pytest
import torch

from benchmarks.recipes import METHODS, VARIANTS
from benchmarks.runner import race
from benchmarks.workloads import WORKLOADS
from tests.support.workloads import WITHOUT_BERT, check_recipe, trainer_of

LAYERED = ["kfac", "hylo", "ekfac_natural", "ekfac_whiten", "kfac_adaptive", "ekfac_adaptive", "ekfac_orthogonal"]
RECIPES = [(name, workload) for name in LAYERED for workload in METHODS[name].recipes if workload in WITHOUT_BERT]
# By default, every fifth pair of a method and a workload, and all methods on one workload.
BY_DEFAULT = [*RECIPES[::5], *((name, workload) for name, workload in RECIPES if workload == "digits")]
CASES = [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in RECIPES]


@pytest.mark.parametrize(("name", "workload"), CASES)
def test_a_recipe_takes_steps(name, workload, data_dir):
    check_recipe(name, workload, data_dir)


def test_every_method_except_for_variants_has_a_recipe_for_every_workload():
    for name, method in METHODS.items():
        assert name in VARIANTS or set(method.recipes) == set(WORKLOADS)


def test_ekfac_has_one_of_two_exponents_on_every_workload():
    exponents = {}
    for workload in WORKLOADS:
        settings = METHODS["ekfac"].settings(workload)
        both = [METHODS[name].settings(workload) for name in ("ekfac_natural", "ekfac_whiten")]
        assert [found.get("power", 1.0) for found in both] == [1.0, 0.5]
        assert settings in both
        exponents[workload] = settings.get("power", 1.0)
    assert exponents["autoencoder"] == 1.0
    assert exponents["resnet20"] == 0.5


def test_skipped_layers_follow_the_fallback(data_dir):
    trainer = trainer_of("kfac", "chargpt", data_dir, skip_layers="LayerNorm,Embedding,head")
    rows = trainer.optimizer.describe().splitlines()
    skipped = {row.split()[0] for row in rows if "left out by skip_layers" in row}
    norms = {f"{name}.{part}" for name in ("layers.0.norm1", "layers.0.norm2", "norm") for part in ("weight", "bias")}
    assert skipped == norms | {"tokens.weight", "positions.weight", "head.weight", "head.bias"}


def test_a_closure_is_needed_only_if_the_loss_is_judged():
    assert not METHODS["kfac"].needs_closure("autoencoder")
    assert METHODS["kfac"].needs_closure("autoencoder", {"adaptive_damping": True})
    assert METHODS["kfac"].needs_closure(None, {"quadratic_model": True})
    assert METHODS["kfac_adaptive"].needs_closure("autoencoder")
    assert not METHODS["kfac_adaptive"].needs_closure("autoencoder", {"adaptive_damping": False, "quadratic_model": 0})


@pytest.mark.parametrize("name", ["kfac_adaptive", "ekfac_adaptive"])
def test_adaptive_damping_moves_with_the_exact_model(name, data_dir):
    trainer = trainer_of(name, "digits", data_dir, damping=0.5, damping_interval=2)
    race([trainer], 4)
    found = trainer.optimizer.diagnostics()
    assert found["damping"][0] == pytest.approx(0.5 * 0.95**4)  # decreased twice
    assert 0.75 < found["reduction_ratio"] < 1.25
    assert found["model_rate"] > 0


def test_the_fisher_of_the_models_own_predictions_is_observed(data_dir):
    trainer = trainer_of("ekfac_natural", "multi30k", data_dir, fisher="mc", factor_update_steps=1, inv_update_steps=1)
    empirical = trainer_of("ekfac_natural", "multi30k", data_dir, factor_update_steps=1, inv_update_steps=1)
    race([trainer, empirical], 2)
    pairs = zip(trainer.model.parameters(), empirical.model.parameters(), strict=True)
    for p, q in pairs:
        for key in ("factor_g", "scale"):
            if key in trainer.optimizer.state[p]:
                one, other = trainer.optimizer.state[p][key], empirical.optimizer.state[q][key]
                assert one.norm() > 0
                assert not torch.allclose(one, other)
