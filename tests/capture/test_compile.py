"""Models under torch.compile: equal factors, no graph breaks, no repeated compilation, a warning about late hooks."""

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn

from secondorder import KFAC
from tests.support.grid import each
from tests.support.kfac import (
    accumulate,
    all_factors,
    assert_captures,
    assert_close,
    assert_factors,
    backward,
    noise,
    plain_kfac,
    train_step,
)
from tests.support.models import convnet, images, mlp, vectors
from tests.support.networks import reused
from tests.support.oracles.kfac import expected_factors
from tests.support.warned import silent, warned

backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(model, backend="aot_eager"):
    return torch.compile(model, backend=backend)


def counted() -> tuple[int, int]:
    """The numbers of graphs and of graph breaks."""
    return dynamo.utils.counters["stats"]["unique_graphs"], sum(dynamo.utils.counters["graph_break"].values())


def whole(model, x, y, backend):
    backward(compiled(model, backend), x, y, F.cross_entropy)


def unequal_micro_batches(model, x, y, backend):
    accumulate(compiled(model, backend), x, y, [3, 2, len(x) - 5])


def among_others(model, x, y, backend):
    """Forwards without a backward, and evaluation."""
    fast = compiled(model, backend)
    fast(torch.cat([x, x[:3]]))
    with torch.no_grad():
        fast(x)
    fast.eval()
    fast(x)
    fast.train()
    backward(fast, x, y, F.cross_entropy)


def a_part(model, x, y, backend):
    next(iter(model.children())).compile(backend=backend)
    backward(model, x, y, F.cross_entropy)


def around_the_model(model, x, y, backend):
    """The user compiles a function that holds the forward and the loss."""
    torch.compile(lambda a, b: F.cross_entropy(model(a), b), backend=backend)(x, y).backward()


@backends
@pytest.mark.parametrize("run", [whole, unequal_micro_batches, among_others, a_part, around_the_model])
def test_factors_equal_the_plain_form_without_a_graph_break(backend, run):
    build, (x, y) = (convnet, images(6)) if run is whole else (mlp, vectors(6))
    assert_captures(build(), build(), x, y, lambda model: run(model, x, y, backend))
    graphs, breaks = counted()
    assert breaks == 0
    assert graphs <= 2 or run is not whole  # torch runs the hooks of a user's own root class as a frame of their own


@backends
@each(approx=["expand", "reduce"], mode=["plain", "non-reentrant", "reentrant"], tokens=[False, True])
def test_in_place_relu_reused_layer_and_checkpointing_inside(backend, mode, approx, tokens):
    x, y = vectors()
    x = noise(6, 3, 4) if tokens else x
    model = reused(mode=mode, inplace=True, repeat=2, tokens=tokens)
    plain = reused(repeat=2, tokens=tokens)
    assert_captures(model, plain, x, y, lambda model: whole(model, x, y, backend), approx=approx)


@backends
def test_a_whole_interval_compiles_two_graphs(backend):
    """One graph has taps, one has none; switching between them compiles nothing after the first interval."""
    model = mlp()
    opt = plain_kfac(model, lr=0.1, momentum=0.9, factor_update_steps=3, inv_update_steps=6)
    fast = compiled(model, backend)
    for t in range(10):
        train_step(opt, fast, *vectors(seed=t), F.cross_entropy)
    graphs, breaks = counted()
    assert graphs <= 2
    assert breaks == 0


def test_plain_steps_run_the_graph_of_the_bare_model():
    """When nothing is due, the compiled graph has exactly the operations of a model without an optimizer."""
    graphs_seen = []

    def recording(module, inputs):
        graphs_seen.append(sorted(str(node.target) for node in module.graph.nodes if node.op.startswith("call")))
        return module.forward

    (x, y), model = vectors(), mlp()
    backward(compiled(mlp(), recording), x, y, F.cross_entropy)
    dynamo.reset()  # hooks are not guarded: the second model would run the first one's graph
    opt = plain_kfac(model, factor_update_steps=10, inv_update_steps=10)
    train_step(opt, model, x, y, F.cross_entropy)  # eager: nothing is due afterwards
    backward(compiled(model, recording), x, y, F.cross_entropy)
    bare, hooked = graphs_seen
    assert bare == hooked


def test_hooks_after_compilation_are_reported_once_by_layer_name():
    """torch.compile ignores hooks that come after its first call: the step warns and follows the fallback rule."""
    (x, y), model = vectors(), nn.ModuleDict({"encoder": mlp((4, 5)), "decoder": mlp((5, 3))})
    model.forward = lambda x: model.decoder(model.encoder(x))
    fast = compiled(model)
    fast(x)
    opt = plain_kfac(model, lr=0.1, fallback="sgd")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    backward(fast, x, y, F.cross_entropy)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    with pytest.warns(UserWarning, match=r"encoder\.0") as caught:
        opt.step()
    assert "compile" in " ".join(str(w.message) for w in caught)
    for n, p in model.named_parameters():
        assert_close(before[n] - p.detach(), 0.1 * gradients[n], 1e-12, n)
    with silent():
        for seed in range(3):
            train_step(opt, fast, *vectors(seed=seed), F.cross_entropy)


def train_two_of_a_class() -> tuple[KFAC, nn.Module, list[str], list[int]]:
    """A model trains with AdamW, and then one of the same class with KFAC, which is created before the first call."""
    x, y = vectors()
    other, model = reused(), reused()
    adam, opt = torch.optim.AdamW(other.parameters()), plain_kfac(model, lr=0.0)
    fast = {adam: compiled(other), opt: compiled(model)}
    train_step(adam, fast[adam], x, y, F.cross_entropy)
    with warned() as caught:
        for optimizer in (opt, adam, opt):
            train_step(optimizer, fast[optimizer], x, y, F.cross_entropy)
    return opt, model, caught, [opt.state[b.owner]["factor_updates"] for b in opt.blocks.values()]


def test_a_second_model_of_a_class_is_named_with_the_remedy():
    """torch runs what it compiled for the first model and does not check whether the second one has hooks."""
    _, _, (message,), updates = train_two_of_a_class()
    assert updates == [0, 0, 0]
    remedies = "torch._dynamo.config.skip_nnmodule_hook_guards = False", "torch.compiler.reset()"
    assert all(part in message for part in ("head", "same class", *remedies))


def test_models_of_a_class_that_train_in_turn_are_covered_if_torch_guards_hooks():
    expected = expected_factors(reused(), *vectors(), F.cross_entropy)
    with dynamo.config.patch(skip_nnmodule_hook_guards=False):
        opt, model, messages, updates = train_two_of_a_class()
        assert messages == []
        assert updates == [2, 2, 2]
        assert_factors(all_factors(opt, model), expected)
        late = reused()  # compiled before its optimizer
        fast = compiled(late)
        fast(vectors()[0])
        opt = plain_kfac(late, lr=0.0)
        train_step(opt, fast, *vectors(), F.cross_entropy)
        assert_factors(all_factors(opt, late), expected)


@pytest.mark.parametrize("first", ["adamw, then a reset", "kfac"])
def test_a_second_model_of_a_class_is_covered_after_a_reset_or_an_optimizer_of_the_same_kind(first):
    (x, y), other = vectors(), reused()
    opt = plain_kfac(other, lr=0.0) if first == "kfac" else torch.optim.AdamW(other.parameters())
    train_step(opt, compiled(other, "eager"), x, y, F.cross_entropy)
    if first != "kfac":
        torch.compiler.reset()
    assert_captures(reused(), reused(), x, y, lambda model: whole(model, x, y, "eager"))
