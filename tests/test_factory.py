"""Methods and strategies are created by name."""

import re
from functools import partial

import pytest
import torch

import secondorder
from secondorder import KFAC, MFAC, LowRank, MemOpt, SecondOrderOptimizer, SparseMFAC, TopK
from secondorder.comm import DedicatedWorkers, Local, LocalFactors, from_name
from secondorder.comm.names import STRATEGIES
from secondorder.methods.names import ALIASES, METHODS, resolve
from tests.support.models import fit, mlp


@pytest.fixture
def model():
    return mlp((6, 5, 3))


def compression_of(optimizer):
    return optimizer.preconditioner.structure.compression


# ---------------------------------------------------------------------- methods
def test_every_method_has_a_name():
    public = {getattr(secondorder, name) for name in secondorder.__all__}
    found = {c for c in public if isinstance(c, type) and issubclass(c, SecondOrderOptimizer)}
    assert found - {SecondOrderOptimizer} == set(METHODS.values())
    assert {name: cls.__name__.lower() for name, cls in METHODS.items()} == {n: n.replace("_", "") for n in METHODS}


@pytest.mark.parametrize("name", [*METHODS, *ALIASES])
def test_every_name_builds_and_trains(name, model):
    before = [p.detach().clone() for p in model.parameters()]
    with secondorder.create(name, model, lr=1e-3) as optimizer:
        assert type(optimizer) is METHODS[resolve(name).method]
        after = fit(model, optimizer, 8, 6, steps=3)
    assert not all(map(torch.equal, before, after))
    assert all(p.isfinite().all() for p in after)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, SparseMFAC) for name in ("sparse_mfac", "sparse-mfac", "SparseMFAC", "SPARSE_MFAC", " sparsemfac ")),
        ("K-FAC", KFAC), ("EK-FAC", secondorder.EKFAC), ("M-FAC", MFAC), ("Eigen-DP", KFAC),  # as papers write them
    ],
)  # fmt: skip
def test_case_and_dashes_do_not_matter(name, method, model):
    assert type(secondorder.create(name, model)) is method


@pytest.mark.parametrize(
    ("name", "option", "value", "strategy"),
    [
        ("eigen", "inverse_method", "eigen", Local),
        ("inverse", "inverse_method", "cholesky", Local),
        ("eigen_dp", "inverse_method", "eigen", LocalFactors),  # factors from the data of their owner
        ("inverse_dp", "inverse_method", "cholesky", LocalFactors),
        ("dp_kfac", "inverse_method", "eigen", LocalFactors),
        *((name, "mode", name, Local) for name in ("kid", "kis", "sngd")),
        *((name, "compression", TopK(), Local) for name in ("kgmfac", "ksggt", "kdggt")),
        ("lrmfac", "compression", LowRank(), Local),
        ("r1mfac", "compression", LowRank(1), Local),
    ],
)
def test_an_alias_stands_for_an_option_and_a_strategy(name, option, value, strategy, model):
    optimizer = secondorder.create(name, model)
    found = compression_of(optimizer) if option == "compression" else optimizer.param_groups[0][option]
    assert found == value
    assert isinstance(optimizer.comm, strategy)


def test_a_keyword_of_the_caller_wins_over_the_alias(model):
    assert secondorder.create("eigen", model, inverse_method="cholesky").param_groups[0]["inverse_method"] == "cholesky"
    assert compression_of(secondorder.create("ksggt", model, window_size=4, compression=LowRank(2))) == LowRank(2)
    assert type(secondorder.create("eigen_dp", model, comm=MemOpt()).comm) is MemOpt


def test_a_name_is_equivalent_to_its_class(model):
    twin = mlp((6, 5, 3))
    by_name = fit(model, secondorder.create("inverse", model, lr=0.05, damping=0.1), 8, 6, steps=3)
    by_class = fit(twin, KFAC(twin, lr=0.05, damping=0.1, inverse_method="cholesky"), 8, 6, steps=3)
    assert all(map(torch.equal, by_name, by_class))


def test_unknown_names_and_options_are_refused(model):
    with pytest.raises(ValueError, match="unknown method 'shampoo'") as caught:
        secondorder.create("shampoo", model)
    assert all(name in str(caught.value) for name in [*METHODS, *ALIASES])
    with pytest.raises(TypeError, match="must be a string"):
        secondorder.create(KFAC, model)
    with pytest.raises(TypeError, match="fac_update_freq"):
        secondorder.create("eigen", model, fac_update_freq=1)


def test_parameters_and_groups_are_accepted(model):
    assert type(secondorder.create("mfac", model.parameters(), window_size=4)) is MFAC
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2].parameters())}]
    optimizer = secondorder.create("kfac", groups, lr=0.1, module=model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_a_factory_of_a_trainer(model):
    """transformers 5 calls the factory without arguments, and the result with the model and its keywords."""

    def build(optimizer_cls_or_factory, **optimizer_kwargs):
        return optimizer_cls_or_factory()(model, **optimizer_kwargs)

    optimizer = build(lambda: partial(secondorder.create, "kfac"), lr=0.02, comm="comm_opt")
    assert type(optimizer) is KFAC
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert type(secondorder.create(name="kfac", model=model)) is KFAC


# ---------------------------------------------------------------------- strategies
@pytest.mark.parametrize(
    ("text", "built"),
    [
        *((name, "CommOpt()") for name in ("comm_opt", "COMM_OPT")),
        *((name, "MemOpt()") for name in ("MemOpt", "mem-opt", "mem_opt:replicate_factors=none")),
        ("mem_opt:wire_dtype=bfloat16", "MemOpt(wire_dtype=torch.bfloat16)"),
        ("hybrid_opt", "HybridOpt(grad_worker_fraction=0.5)"),
        ("hybrid_opt:0.25", "HybridOpt(grad_worker_fraction=0.25)"),
        ("hybrid_opt: 1, replicate_factors=true", "HybridOpt(grad_worker_fraction=1.0, replicate_factors=True)"),
        ("local_factors", "LocalFactors()"),
        ("chief_only", "ChiefOnly(root=0, deliver='gradients', statistics='all')"),
        ("chief_only:1, deliver=inverses", "ChiefOnly(root=1, deliver='inverses', statistics='all')"),
        ("chief_only:deliver='inverses'", "ChiefOnly(root=0, deliver='inverses', statistics='all')"),
    ],
)
def test_a_strategy_by_name(text, built, model):
    assert repr(from_name(text)) == built
    assert from_name(text) is not from_name(text)
    assert repr(secondorder.create("kfac", model, comm=text).comm) == built


def test_strategies_without_a_repr_by_name():
    assert type(from_name("local")) is Local
    for roles in ("", ":gradient=[0, 1], factor=[2], inverse=[3], mode=opportunistic"):
        assert type(from_name(f"dedicated_workers{roles}")) is DedicatedWorkers


def test_the_error_for_an_unknown_strategy_lists_all(model):
    with pytest.raises(ValueError, match="unknown strategy 'fast'") as caught:
        secondorder.create("kfac", model, comm="fast")
    assert all(name in str(caught.value) for name in STRATEGIES)
    with pytest.raises(TypeError, match="must be a string"):
        from_name(MemOpt())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hybrid_opt:2", "grad_worker_fraction must be finite, > 0.0 and <= 1.0"),
        ("mem_opt:0.5", "comm='mem_opt:0.5': "),
        ("mem_opt:fraction=0.5", "unexpected keyword argument 'fraction'"),
        *((f"mem_opt:{bad}", "must be written as in Python")
          for bad in ("a b", "**{}", "*[1]", "__import__('os')", "1) + f(2")),
    ],
)  # fmt: skip
def test_bad_arguments_of_a_strategy(text, why):
    with pytest.raises(ValueError, match=f"(?s){re.escape(why)}"):
        from_name(text)
