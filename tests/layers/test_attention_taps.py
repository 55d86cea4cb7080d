"""Attention through projections: torch's results bit for bit, and the user's module untouched.

The rows of the projections are tested in `test_layer_types.py` and `test_attention.py`, by their factors.
"""

import copy
import gc
import itertools
import pickle
import threading
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import secondorder.nn
from secondorder.capture.layers.attention import WatchedAttention
from secondorder.capture.layers.projections import Projection
from tests.support.grid import each, pairs
from tests.support.kfac import noise
from tests.support.operators import Operators

E, HEADS, L, S, N = 6, 2, 3, 4, 2


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    assert torch.overrides._get_current_function_mode_stack() == []


def attention(**options) -> nn.MultiheadAttention:
    """In training mode, with no parameter at the zero that torch gives to biases."""
    module = nn.MultiheadAttention(options.pop("embed_dim", E), options.pop("num_heads", HEADS), **options).double()
    for i, p in enumerate(module.parameters()):
        p.data.copy_(noise(*p.shape, seed=100 + i))
    return module


def watch(module: nn.MultiheadAttention, wanted=lambda: True) -> WatchedAttention:
    watched = WatchedAttention(module)
    watched.install(wanted)
    return watched


def tap(projection: Projection) -> list[list[Tensor]]:
    """Input and gradient at the output of every call."""
    calls: list[list[Tensor]] = []

    def hook(module, args, output):
        if output.requires_grad:
            call = [args[0].detach()]
            calls.append(call)
            output.register_hook(lambda g: call.append(g))

    projection.register_forward_hook(hook)
    return calls


def inputs(kind: str, module: nn.MultiheadAttention) -> list[Tensor]:
    """Query, key and value: one tensor, two or three, in the module's layout."""

    def sequence(length: int, width: int, seed: int) -> Tensor:
        x = noise(length, N, width, seed=seed)
        return x.transpose(0, 1).contiguous() if module.batch_first else x

    query = sequence(L, module.embed_dim, 1)
    if kind == "self":
        return [query] * 3
    key = sequence(S, module.kdim, 2)
    if kind == "cross":
        return [query, key, key]
    found = [query, key, sequence(S, module.vdim, 3)]
    return [x[0] if module.batch_first else x[:, 0] for x in found] if kind == "unbatched" else found


def outcome(module: nn.MultiheadAttention, tensors: list[Tensor], **options) -> list[Tensor | None]:
    """Outputs and all gradients; equal tensors stay one tensor."""
    leaves = {id(x): x.detach().clone().requires_grad_() for x in tensors}
    torch.manual_seed(7)
    module.zero_grad()
    out, weights = module(*(leaves[id(x)] for x in tensors), **options)
    total = (out.sin() * torch.linspace(1, 2, out.numel()).view(out.shape)).sum()
    (total if weights is None else total + weights.square().sum()).backward()
    return [out, weights, *(x.grad for x in leaves.values()), *(p.grad for p in module.parameters())]


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype)


def mask_options(tensors: list[Tensor], module: nn.MultiheadAttention) -> list[dict[str, Tensor]]:
    """All kinds of masks, which leave the first key to every query."""
    batched = tensors[0].dim() == 3
    axis = 1 if batched and module.batch_first else 0
    length, sources, batch = tensors[0].shape[axis], tensors[1].shape[axis], N if batched else 1
    keys = noise(batch, sources) > 0.5
    keys = keys if batched else keys[0]
    pairs = noise(length, sources) > 0.5
    pairs[:, 0] = False
    keys[..., 0] = False
    floats = torch.where(keys, -2.0, 0.0).double()
    causal = torch.full((length, sources), -torch.inf, dtype=torch.float64).triu(1)
    return [
        {},
        {"key_padding_mask": keys},
        {"attn_mask": pairs},
        {"attn_mask": pairs.expand(batch * module.num_heads, length, sources)},
        {"attn_mask": pairs, "key_padding_mask": keys},
        {"attn_mask": noise(length, sources), "key_padding_mask": floats},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "is_causal": True, "key_padding_mask": floats},
    ]


MODULES = {
    "plain": {}, "batch first": {"batch_first": True}, "no bias": {"bias": False},
    "one head": {"num_heads": 1, "batch_first": True}, "dropout": {"dropout": 0.4},
    "bias of keys": {"add_bias_kv": True}, "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "separate": {"kdim": 5, "vdim": 3, "add_bias_kv": True},
    "separate, no bias": {"kdim": E, "vdim": 3, "bias": False, "batch_first": True, "dropout": 0.4},
}  # fmt: skip
KINDS = ["self", "cross", "three", "unbatched"]


def fits(kind: str, options: dict) -> bool:
    return "kdim" not in options or kind in ("three", "unbatched")


WEIGHTS = [{"need_weights": False}, {}, {"average_attn_weights": False}]


@pairs(fits, options=MODULES, kind=KINDS)
def test_outputs_and_gradients_are_torchs(options, kind):
    plain = attention(**options)
    tensors = inputs(kind, plain)
    for i, masks in enumerate(mask_options(tensors, plain)):
        seen, exposed = copy.deepcopy(plain), secondorder.nn.expose(copy.deepcopy(plain))
        calls = [tap(projection) for projection in watch(seen).projections.children()]
        call = {**WEIGHTS[(i + KINDS.index(kind)) % 3], **masks}
        expected = outcome(plain, tensors, **call)
        for module in (seen, exposed):
            assert_same_bits(outcome(module, tensors, **call), expected)
        assert any(calls)


def assert_product(calls: list[list[Tensor]], gradient: Tensor) -> None:
    """The gradient of a weight is that of the rows of the only call."""
    ((x, g),) = calls
    assert x.shape[:-1] == g.shape[:-1]
    torch.testing.assert_close(g.flatten(0, -2).T @ x.flatten(0, -2), gradient, rtol=1e-12, atol=1e-12)


def watched_and_plain(**options) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention, list[list[Tensor]]]:
    """A watched module and a plain one, and the calls of the packed projection of the former."""
    plain = attention(**options)
    seen = copy.deepcopy(plain)
    return seen, plain, tap(watch(seen).projections.packed)


def test_other_precisions_autocast_and_batches_of_zero_and_one():
    for kind, low in itertools.product(("self", "cross"), (False, True)):
        seen, plain, _ = watched_and_plain(batch_first=True)
        tensors = [x.float() for x in inputs(kind, plain)]
        tensors[2] = tensors[1]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            assert_same_bits(outcome(seen.float(), tensors), outcome(plain.float(), tensors))
    for batch in (0, 1):
        seen, plain, _ = watched_and_plain()
        tensors = [noise(L, batch, E)] * 3
        assert_same_bits(outcome(seen, tensors), outcome(plain, tensors))


class Uncopyable:
    def __call__(self):
        return True

    def __deepcopy__(self, memo):
        raise AssertionError("a copy of the model copies the optimizer")

    __reduce__ = __deepcopy__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_not_watched(copied):
    module = attention()
    calls = tap(watch(module, Uncopyable()).projections.packed)
    twin = copied(module)
    for hook in (*twin._forward_pre_hooks.values(), *twin._forward_hooks.values()):
        assert not type(hook).__module__.startswith("secondorder")
    expected = outcome(module, inputs("self", module))
    assert_same_bits(outcome(twin, inputs("self", twin)), expected)
    assert len(calls) == 1


def test_nothing_outlives_the_module():
    module = attention()
    watched = watch(module)
    outcome(module, inputs("self", module))
    references = [weakref.ref(module), weakref.ref(watched.projections)]
    del module, watched
    gc.collect()
    assert [r() for r in references] == [None, None]


@torch.no_grad()
def test_eval_keeps_the_fast_path():
    seen, plain, calls = watched_and_plain(batch_first=True)
    x = noise(N, L, E)
    with Operators() as used:
        found = seen.eval()(x, x, x)
    assert "aten._native_multi_head_attention.default" in used.names
    assert_same_bits(found, plain.eval()(x, x, x))
    assert not calls


def test_taps_are_consulted_only_in_training_with_gradients():
    module, x = attention(), inputs("self", attention())
    wanted, passed = Mock(side_effect=itertools.chain([False], itertools.repeat(True))), Mock(return_value=None)
    watched = watch(module, wanted)
    watched.projections.out.register_forward_hook(passed)
    with torch.no_grad():
        module(*x)
    module.eval()(*x)
    assert (wanted.call_count, passed.call_count) == (0, 0)
    module.train()(*x)
    assert (wanted.call_count, passed.call_count) == (1, 0)
    watched.projections.eval()
    module(*x)
    assert wanted.call_count >= 2
    assert passed.call_count == 1
    assert watched.projections.out.training


@each(where=["inside", "register_forward_pre_hook", "register_forward_hook"], prepend=[True, False])
def test_an_exception_inside_or_in_another_hook_leaves_nothing_behind(where, prepend):
    module = attention()
    calls = tap(watch(module).projections.packed)

    def fail(*_):
        raise ZeroDivisionError

    handle = None if where == "inside" else getattr(module, where)(fail, prepend=prepend)
    for _ in range(2):
        with pytest.raises((AssertionError, ZeroDivisionError)):
            module(*([noise(L, N, E + 1)] * 3 if handle is None else inputs("self", module)))
        assert torch.overrides._get_current_function_mode_stack() == []
    if handle is not None:
        handle.remove()
    calls.clear()
    outcome(module, inputs("self", module))
    assert len(calls) == 1


class Outer(nn.MultiheadAttention):
    """Calls another attention before its own."""

    def forward(self, query, key, value, **options):
        x = self.inner(query, key, value)[0]
        return super().forward(x, x, x, **options)


@pytest.mark.parametrize("watched", ["outer", "inner", "both"])
def test_attention_inside_of_attention(watched):
    outer, inner = Outer(E, HEADS).double(), attention()
    outer.inner = inner
    plain, modules = copy.deepcopy(outer), {"outer": outer, "inner": inner}
    calls = {name: tap(watch(m).projections.packed) for name, m in modules.items() if watched in (name, "both")}
    tensors = [noise(L, N, E)] * 3
    assert_same_bits(outcome(outer, tensors), outcome(plain, tensors))
    for name, found in calls.items():
        assert_product(found, modules[name].in_proj_weight.grad)


class Static(nn.MultiheadAttention):
    """Passes keys that need no projection."""

    def forward(self, query, key, value):
        return F.multi_head_attention_forward(
            query, key, value, E, HEADS, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
            self.out_proj.weight, self.out_proj.bias, static_k=noise(N * HEADS, L, E // HEADS),
        )  # fmt: skip


def test_static_keys_are_left_to_torch():
    module = Static(E, HEADS).double()
    calls = [tap(p) for p in watch(module).projections.children()]
    tensors = [noise(L, N, E)] * 3
    assert_same_bits(outcome(module, tensors), outcome(copy.deepcopy(module), tensors))
    assert not any(calls)


def recomputed(module, x, weights, reentrant):
    return checkpoint(lambda z: module(z, z, z)[0], x, use_reentrant=reentrant)


CALLS = {
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
    "with other weights": lambda module, x, weights: torch.func.functional_call(module, weights, (x, x, x))[0],
}


@pytest.mark.parametrize("call", CALLS)
def test_activation_checkpointing_and_functional_calls(call):
    seen, plain, calls = watched_and_plain(dropout=0.3)
    results = []
    for module in (plain, seen):
        trained = dict(module.named_parameters())
        if call == "with other weights":
            trained = {name: (2 * p).detach().requires_grad_() for name, p in trained.items()}
        torch.manual_seed(1)
        x = noise(L, N, E).requires_grad_()
        out = CALLS[call](module, x, trained)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in trained.values())])
    assert_same_bits(results[1], results[0])
    assert_product([c for c in calls if len(c) == 2], trained["in_proj_weight"].grad)


def test_one_module_in_two_threads():
    module = attention()
    calls = tap(watch(module).projections.packed)
    inside, leave = threading.Event(), threading.Event()

    def slow(m, args):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(10)

    module.register_forward_pre_hook(slow)
    thread = threading.Thread(target=module, args=inputs("self", module))
    thread.start()
    inside.wait(10)
    module(*inputs("self", module))
    assert torch.overrides._get_current_function_mode_stack() == []
    leave.set()
    thread.join()
    assert len(calls) == 2


class Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fresh_compiler")
def test_attention_is_watched_inside_a_user_mode_but_not_when_compiled():
    seen, plain, calls = watched_and_plain()
    tensors = inputs("self", plain)
    expected = outcome(plain, tensors)
    with Counting() as mode:
        assert_same_bits(outcome(seen, tensors), expected)
    assert mode.count > 0
    assert len(calls) == 1
    assert_same_bits(outcome(torch.compile(seen, backend="eager"), tensors), expected)
    assert len(calls) == 1
