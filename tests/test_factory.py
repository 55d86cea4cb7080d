"""Methods and strategies by name."""

from functools import partial

import pytest
import torch
from torch import nn

import secondorder
from secondorder import (
    EKFAC,
    GGT,
    KFAC,
    MFAC,
    CommOpt,
    DedicatedWorkers,
    HybridOpt,
    HyLo,
    LocalFactors,
    LowRank,
    MemOpt,
    SecondOrderOptimizer,
    SparseMFAC,
    TopK,
)
from secondorder.comm import ChiefOnly, Local, from_name
from secondorder.comm.names import STRATEGIES
from secondorder.factory import ALIASES, METHODS, resolve

CLASSES = {"kfac": KFAC, "ekfac": EKFAC, "hylo": HyLo, "mfac": MFAC, "sparse_mfac": SparseMFAC, "ggt": GGT}


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def compression_of(optimizer):
    return optimizer.preconditioner.structure.compression


def train(optimizer, model, steps=3):
    inputs = torch.randn(8, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


# ---------------------------------------------------------------------- methods
def test_every_method_has_a_name():
    assert dict(METHODS) == CLASSES
    public = {getattr(secondorder, name) for name in secondorder.__all__}
    found = {c for c in public if isinstance(c, type) and issubclass(c, SecondOrderOptimizer)}
    assert found - {SecondOrderOptimizer} == set(METHODS.values())


@pytest.mark.parametrize("name", [*METHODS, *ALIASES])
def test_every_name_builds_and_trains(name, model):
    with secondorder.create(name, model, lr=1e-3) as optimizer:
        assert type(optimizer) is CLASSES[resolve(name).method]
        before = [p.detach().clone() for p in model.parameters()]
        train(optimizer, model)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["sparse_mfac", "sparse-mfac", "SparseMFAC", "SPARSE_MFAC", " sparsemfac "])
def test_case_and_dashes_do_not_matter(name, model):
    assert type(secondorder.create(name, model, window_size=4)) is SparseMFAC


@pytest.mark.parametrize(("name", "method"), [("K-FAC", KFAC), ("EK-FAC", EKFAC), ("M-FAC", MFAC), ("Eigen-DP", KFAC)])
def test_names_as_papers_write_them(name, method, model):
    assert type(secondorder.create(name, model)) is method


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("eigen", "inverse_method", "eigen"),
        ("inverse", "inverse_method", "cholesky"),
        ("eigen_dp", "inverse_method", "eigen"),
        ("inverse_dp", "inverse_method", "cholesky"),
        ("dp_kfac", "inverse_method", "eigen"),
        ("kid", "mode", "kid"),
        ("kis", "mode", "kis"),
        ("sngd", "mode", "sngd"),
    ],
)
def test_an_alias_stands_for_an_option(name, option, value, model):
    assert secondorder.create(name, model).param_groups[0][option] == value


@pytest.mark.parametrize("name", ["eigen_dp", "inverse_dp", "dp_kfac"])
def test_dp_names_estimate_factors_from_the_owners_data(name, model):
    assert isinstance(secondorder.create(name, model).comm, LocalFactors)


@pytest.mark.parametrize("name", ["eigen", "inverse", "kgmfac"])
def test_other_names_leave_the_strategy_alone(name, model):
    assert isinstance(secondorder.create(name, model).comm, Local)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kgmfac", TopK()), ("lrmfac", LowRank()), ("r1mfac", LowRank(1)), ("ksggt", TopK()), ("kdggt", TopK())],
)
def test_an_alias_stands_for_a_compression(name, expected, model):
    assert compression_of(secondorder.create(name, model, window_size=4)) == expected


def test_a_keyword_of_the_caller_wins_over_the_alias(model):
    assert secondorder.create("eigen", model, inverse_method="cholesky").param_groups[0]["inverse_method"] == "cholesky"
    assert compression_of(secondorder.create("ksggt", model, window_size=4, compression=LowRank(2))) == LowRank(2)
    assert isinstance(secondorder.create("eigen_dp", model, comm=MemOpt()).comm, MemOpt)
    assert not isinstance(secondorder.create("eigen_dp", model, comm=MemOpt()).comm, LocalFactors)


def test_a_name_and_its_class_do_the_same(model):
    twin = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    twin.load_state_dict(model.state_dict())
    for net, optimizer in (
        (model, secondorder.create("inverse", model, lr=0.05, damping=0.1)),
        (twin, KFAC(twin, lr=0.05, damping=0.1, inverse_method="cholesky")),
    ):
        torch.manual_seed(1)
        train(optimizer, net)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_an_unknown_name_lists_all(model):
    with pytest.raises(ValueError, match="unknown method 'shampoo'") as caught:
        secondorder.create("shampoo", model)
    assert all(name in str(caught.value) for name in [*METHODS, *ALIASES])


def test_a_class_is_no_name(model):
    with pytest.raises(TypeError, match="must be text"):
        secondorder.create(KFAC, model)


def test_an_unknown_keyword_is_the_constructors_error(model):
    with pytest.raises(TypeError, match="fac_update_freq"):
        secondorder.create("eigen", model, fac_update_freq=1)


def test_parameters_and_groups_are_taken_too(model):
    assert type(secondorder.create("mfac", model.parameters(), window_size=4)) is MFAC
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2].parameters())}]
    optimizer = secondorder.create("kfac", groups, lr=0.1, module=model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_a_factory_of_a_trainer(model):
    """transformers 5 calls what it was given without arguments, and the result with the model and its keywords."""

    def build(optimizer_cls_or_factory, **optimizer_kwargs):
        return optimizer_cls_or_factory()(model, **optimizer_kwargs)

    optimizer = build(lambda: partial(secondorder.create, "kfac"), lr=0.02, comm="comm_opt")
    assert type(optimizer) is KFAC
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert type(secondorder.create(name="kfac", model=model)) is KFAC


# ---------------------------------------------------------------------- strategies
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("comm_opt", CommOpt),
        ("COMM_OPT", CommOpt),
        ("MemOpt", MemOpt),
        ("mem-opt", MemOpt),
        ("hybrid_opt", HybridOpt),
        ("hybrid_opt:0.5", HybridOpt),
        ("local_factors", LocalFactors),
        ("chief_only", ChiefOnly),
        ("local", Local),
    ],
)
def test_a_strategy_by_name(text, kind, model):
    assert type(from_name(text)) is kind
    assert type(secondorder.create("kfac", model, comm=text).comm) is kind


@pytest.mark.parametrize(
    "text", ["dedicated_workers", "dedicated_workers:gradient=[0, 1], factor=[2], inverse=[3], mode=opportunistic"]
)
def test_roles_by_name(text):
    assert type(from_name(text)) is DedicatedWorkers


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("hybrid_opt:0.25", "HybridOpt(grad_worker_fraction=0.25)"),
        ("hybrid_opt: 0.25, replicate_factors=true", "HybridOpt(grad_worker_fraction=0.25, replicate_factors=True)"),
        ("mem_opt:wire_dtype=bfloat16", "MemOpt(wire_dtype=torch.bfloat16)"),
        ("mem_opt:replicate_factors=none", "MemOpt()"),
        ("chief_only:1, deliver=inverses", "ChiefOnly(root=1, deliver='inverses', statistics='all')"),
        ("chief_only:deliver='inverses'", "ChiefOnly(root=0, deliver='inverses', statistics='all')"),
    ],
)
def test_arguments_of_a_strategy(text, built):
    assert repr(from_name(text)) == built


def test_every_call_builds_a_strategy_of_its_own():
    assert from_name("mem_opt") is not from_name("mem_opt")


def test_an_unknown_strategy_lists_all(model):
    with pytest.raises(ValueError, match="unknown strategy 'fast'") as caught:
        secondorder.create("kfac", model, comm="fast")
    assert all(name in str(caught.value) for name in STRATEGIES)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hybrid_opt:2", "grad_worker_fraction must be in"),
        ("mem_opt:0.5", "comm='mem_opt:0.5': "),
        ("mem_opt:fraction=0.5", "unexpected keyword argument 'fraction'"),
        ("mem_opt:a b", "must stand as in Python"),
        ("mem_opt:**{}", "must stand as in Python"),
        ("mem_opt:*[1]", "must stand as in Python"),
        ("mem_opt:__import__('os')", "must stand as in Python"),
        ("mem_opt:1) + f(2", "must stand as in Python"),
    ],
)
def test_bad_arguments_of_a_strategy(text, why):
    with pytest.raises(ValueError, match="(?s).*") as caught:
        from_name(text)
    assert why in str(caught.value)


def test_a_strategy_is_no_name_of_one():
    with pytest.raises(TypeError, match="must be text"):
        from_name(MemOpt())
