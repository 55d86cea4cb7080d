"""Modules of `secondorder.nn`: torch's results for all options, and conversion of whole models.

The oracle is the torch module with the same parameters, to 1e-12 in float64. The rows of their projections are tested
in `test_layer_types.py`, by their factors.
"""

import copy
import itertools
import pickle
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import secondorder.nn
from secondorder import KFAC
from secondorder.nn import expose
from tests.support.grid import each, pairs
from tests.support.kfac import noise
from tests.support.models import Net
from tests.support.warned import silent

D, H, T, N = 3, 4, 5, 3
LAYERS, CELLS = ("LSTM", "GRU", "RNN"), ("LSTMCell", "GRUCell", "RNNCell")
KINDS = {**dict.fromkeys([*LAYERS, *CELLS], (D, H)), "MultiheadAttention": (6, 2)}


def build(kind: str, *sizes: int, **options) -> nn.Module:
    torch.manual_seed(1)
    return getattr(nn, kind)(*(sizes or KINDS[kind]), **options).double()


class Tap(list):
    """Inputs of every call of a projection."""

    armed = True

    def __call__(self, module, args, output):
        self.append(args[0].detach())


def tap_all(module: nn.Module) -> dict[str, Tap]:
    """Taps on every projection of an exposed module."""
    taps = {}
    for part in module.linear_parts():
        for projection, _ in part.taps:
            if not projection._forward_hooks:
                taps[part.suffix] = Tap()
                projection.register_forward_hook(taps[part.suffix])
    return taps


def pair(kind: str, *sizes: int, **options) -> tuple[nn.Module, nn.Module]:
    """torch's module, and a copy that is exposed and tapped, so that it computes step by step."""
    plain = build(kind, *sizes, **options)
    seen = expose(copy.deepcopy(plain))
    tap_all(seen)
    return plain, seen


def states(kind: str, *shape: int, proj: int = 0) -> tuple[Tensor, ...]:
    found = (noise(*shape, proj or H, seed=21),)
    return (*found, noise(*shape, H, seed=22)) if kind.startswith("LSTM") else found


def as_hx(kind: str, given: tuple[Tensor, ...] | None):
    return given if given is None or kind.startswith("LSTM") else given[0]


def flat(outputs) -> list[Tensor]:
    """Tensors in outputs; torch does not look into packed sequences by itself."""
    if isinstance(outputs, PackedSequence):
        outputs = tuple(outputs)
    if isinstance(outputs, tuple):
        return [leaf for part in outputs for leaf in flat(part)]
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def outcome(module: nn.Module, inputs: list[Tensor], given=None, kind: str = "", pack=None) -> list[Tensor]:
    """Outputs and the gradients of inputs, states and parameters."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    given = None if given is None else tuple(s.detach().clone().requires_grad_() for s in given)
    torch.manual_seed(5)
    module.zero_grad()
    outputs = flat(module(pack(inputs) if pack else inputs[0], as_hx(kind, given)))
    real = [t for t in outputs if t.is_floating_point()]
    sum((t.sin() * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in real).backward()
    return [*outputs, *(x.grad for x in [*inputs, *(given or ())]), *(p.grad for p in module.parameters())]


assert_equal = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


LENGTHS = {"packed": [5, 2, 2], "unsorted": [2, 4, 1], "alone": [3]}  # of packed sequences


@pairs(
    lambda kind, form, batch_first, **_: not (form == "sequence" and batch_first), kind=LAYERS,
    form=["batch", "sequence", "packed", "unsorted", "alone"], states_given=[False, True], num_layers=[1, 2],
    bidirectional=[False, True], batch_first=[False, True], bias=[False, True], own=[False, True],
)  # fmt: skip
def test_layers_give_torchs_results(kind, form, states_given, num_layers, bidirectional, batch_first, bias, own):
    """``own`` is the option that only layers of this kind have."""
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
    if own:
        options |= {"LSTM": {"proj_size": 2}, "RNN": {"nonlinearity": "relu"}}.get(kind, {})
    plain, seen = pair(kind, **options)
    batch = {"sequence": (), "alone": (1,)}.get(form, (N,))
    number = num_layers * (1 + bidirectional)
    given = states(kind, number, *batch, proj=options.get("proj_size", 0)) if states_given else None
    pack = None
    inputs = [noise(T, *batch, D).transpose(0, 1) if batch_first else noise(T, *batch, D)]
    if form in LENGTHS:
        inputs = [noise(length, D, seed=i) for i, length in enumerate(LENGTHS[form])]
        pack = partial(pack_sequence, enforce_sorted=form == "packed")
    found, expected = (outcome(m, inputs, given, kind, pack) for m in (seen, plain))
    assert_equal(found, expected)
    assert found[0].stride() == expected[0].stride()


@pairs(
    lambda kind, options, **_: "nonlinearity" not in options or kind == "RNNCell", kind=CELLS,
    options={"": {}, "no-bias": {"bias": False}, "relu": {"nonlinearity": "relu"}},
    batch={"batch": (N,), "one": (), "none": (0,)}, states_given=[False, True],
)  # fmt: skip
def test_cells_give_torchs_results(kind, options, batch, states_given):
    plain, seen = pair(kind, **options)
    given = states(kind, *batch) if states_given else None
    assert_equal(*(outcome(m, [noise(*batch, D)], given, kind) for m in (seen, plain)))


@each(kind=LAYERS, packed=[False, True])
def test_dropout_between_layers_draws_the_same_numbers(kind, packed):
    plain, seen = pair(kind, num_layers=3, dropout=0.4, bidirectional=True)
    inputs = [noise(T, D, seed=i) for i in range(N)]
    pack = pack_sequence if packed else lambda xs: torch.stack(xs, 1)
    for training in (True, False):
        assert_equal(*(outcome(m.train(training), inputs, None, kind, pack) for m in (seen, plain)))
    results = []
    for module in (plain.train(), seen.train()):  # recomputed in backward, too
        torch.manual_seed(3)
        x = noise(T, N, D).requires_grad_()
        module.zero_grad()
        checkpoint(lambda z, m=module: m(z)[0], x, use_reentrant=packed).square().sum().backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
    assert_equal(results[1], results[0])


@pairs(
    lambda kind, options, **_: "proj_size" not in options or kind == "LSTM", kind=LAYERS,
    dtypes={
        "bfloat16": (torch.float32, torch.bfloat16), "float16": (torch.float32, torch.float16),
        "bfloat16-all": (torch.bfloat16, torch.bfloat16),
    },
    options={
        "": {}, "dropout": {"batch_first": True, "dropout": 0.5}, "projected": {"proj_size": 2, "bidirectional": True},
    },
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_autocast_gives_what_torch_gives_on_this_machine(kind, dtypes, options):
    """Not every processor has all kernels in low precision: if torch refuses, the same error is raised."""
    dtype, computed_in = dtypes
    first = options.get("batch_first", False)

    def result(module: nn.Module, x: Tensor) -> list[Tensor] | str:
        torch.manual_seed(5)
        try:
            with torch.autocast("cpu", dtype=computed_in):
                return [*flat(module.float()(x)), torch.rand(2)]
        except RuntimeError as refusal:
            return str(refusal)

    for lengths in (None, [5, 3, 3], [5, 5, 5]):
        x = noise(*((N, T) if first else (T, N)), D).to(dtype)
        x = pack_padded_sequence(x, lengths, first) if lengths else x
        plain, seen = (result(module, x) for module in pair(kind, num_layers=2, **options))
        if isinstance(plain, str):
            assert seen == plain
        else:
            torch.testing.assert_close(seen, plain, rtol=0.05, atol=0.05)


# inputs of a layer, and the shape of its state
WRONG = [
    (noise(1, T, N, D), None), (noise(T, N, D + 1), None), (noise(T, N, D).float(), None), (noise(0, N, D), None),
    (noise(T, N, D), (1, N + 1, H)), (noise(T, N, D), (1, H)), (noise(T, D), (1, N, H)),
    (noise(T, N, D), (1, N, H + 1)),
]  # fmt: skip
WRONG_FOR_CELLS = [(noise(N, D), (1, H)), (noise(N, D), (N, 1)), (noise(T, N, D), None), (noise(D), (N, H))]


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_what_torch_refuses_is_refused(kind):
    for x, shape in WRONG if kind in LAYERS else WRONG_FOR_CELLS:
        hx = None if shape is None else as_hx(kind, (noise(*shape), noise(*shape)))
        for module in pair(kind):
            with pytest.raises((RuntimeError, ValueError)):
                module(x, hx)


def test_the_input_is_multiplied_at_once_and_the_state_step_by_step():
    """The state of packed data has only the sequences that have not ended."""

    def shapes_of(taps: dict[str, Tap]) -> dict[str, list[tuple[int, ...]]]:
        return {name: [tuple(a.shape) for a in tap] for name, tap in taps.items()}

    x = noise(T, N, D)
    for batch_first in (False, True):
        module = expose(build("LSTM", batch_first=batch_first, proj_size=2))
        taps = tap_all(module)
        module(x.transpose(0, 1) if batch_first else x)
        assert shapes_of(taps) == {"ih_l0": [(T, N, D)], "hh_l0": [(N, 2)] * T, "hr_l0": [(N, H)] * T}
        assert torch.equal(taps["ih_l0"][0], x)
    module = expose(build("GRU", bidirectional=True))
    taps = tap_all(module)
    module(pack_sequence([noise(3, D), noise(1, D)]))
    inputs, states = [(1, 4, D)], [(2, H), (1, H), (1, H)]
    forward = {"ih_l0": inputs, "hh_l0": states}
    assert shapes_of(taps) == forward | {"ih_l0_reverse": inputs, "hh_l0_reverse": states[::-1]}


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_the_kernel_runs_when_no_tap_is_waiting(kind):
    module = expose(build(kind))
    taps = tap_all(module)
    first, counts = next(iter(taps.values())), []
    for armed, training in itertools.product([True, False], [True, False]):
        module.train(training)
        for tap in taps.values():
            tap.armed = armed
        with torch.no_grad():
            module(*arguments(kind))
        counts.append(len(first))
    assert counts == [1, 1, 1, 1]


def arguments(kind: str) -> list[Tensor]:
    return [noise(N, D)] if kind in CELLS else [noise(T, N, D)] if kind in LAYERS else [noise(T, N, 6)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_states_copies_and_functional_calls(kind):
    """States load both ways, a copy has its own projections, and a functional call uses the given weights."""
    plain, back, expected = (build(kind) for _ in range(3))
    seen, x = getattr(secondorder.nn, kind)(*KINDS[kind]).double(), arguments(kind)
    assert list(seen.state_dict()) == list(plain.state_dict())
    seen.load_state_dict(plain.state_dict())
    back.load_state_dict({name: 2 * value for name, value in seen.state_dict().items()})
    for a, b in zip(plain.parameters(), back.parameters(), strict=True):
        assert torch.equal(2 * a, b)
    module = expose(plain)
    for copied in COPIES.values():
        twin = copied(module)
        assert type(twin) is type(module)
        assert [part[:3] for part in twin.linear_parts()] == [part[:3] for part in module.linear_parts()]
        own = set(module.modules())
        assert not any(projection in own for part in twin.linear_parts() for projection, _ in part.taps)
        for a, b in zip(flat(twin(*x)), flat(module(*x)), strict=True):
            assert torch.equal(a, b)
    tap_all(module)
    other = {name: (0.5 * p).detach() for name, p in module.named_parameters()}
    expected.load_state_dict(other)
    assert_equal(flat(torch.func.functional_call(module, other, tuple(x))), flat(expected(*x)))


def through_all(net, x):
    for layer in net.rnn:
        x, _ = layer(x)
    return net.encoder(x) + net.cell(x[0])[0]


def test_a_model_is_converted_in_place():
    rnn = nn.ModuleList([nn.LSTM(D, H, 2), nn.GRU(H, H), nn.RNN(H, H)])
    encoder = nn.TransformerEncoderLayer(H, 2, 8, dropout=0.0, batch_first=True)
    model = Net(through_all, rnn=rnn, cell=nn.LSTMCell(H, H), encoder=encoder).double()
    called = Mock(return_value=None)
    model.rnn[0].register_forward_hook(called)
    before, keys = {n: id(p) for n, p in model.named_parameters()}, list(model.state_dict())
    expected = model(noise(T, N, D))
    with silent():
        assert expose(model) is model
        kinds = [type(m) for m in model.modules()]
        assert expose(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    names = ["LSTM", "GRU", "RNN", "LSTMCell", "MultiheadAttention"]
    found = [*model.rnn, model.cell, model.encoder.self_attn]
    assert [type(m) for m in found] == [getattr(secondorder.nn, name) for name in names]
    for module in found:
        tap_all(module)
    assert_equal([model(noise(T, N, D))], [expected])
    assert called.call_count == 2


def test_a_converted_module_keeps_its_mode_and_its_copy_is_not_watched():
    module = expose(build("LSTM").eval())
    assert not any(child.training for child in module.modules())
    module.train()
    assert all(child.training for child in module.modules())
    optimizer = KFAC(module, lr=0.1)
    assert all(projection.watched for projection in module.projections.values())
    assert not any(projection.watched for projection in copy.deepcopy(module).projections.values())
    optimizer.detach()


class Own(nn.GRU):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


class Wider(nn.LSTM):
    """Extends the torch module without changing what it computes."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 2 * size)

    def width(self) -> int:
        return self.hidden_size


def test_modules_that_must_keep_their_class_are_named():
    normed = weight_norm(nn.LSTM(D, H), "weight_hh_l0")
    model = nn.ModuleDict({"own": Own(D, H), "normed": normed, "plain": nn.GRU(D, H), "patched": nn.RNN(D, H)})
    model["patched"].forward = lambda input: input
    kinds = {name: type(module) for name, module in model.items()}
    with pytest.warns(UserWarning, match="own .*forward of its own.*normed .*parametrized.*patched") as caught:
        expose(model)
    assert "plain" not in str(caught[0].message)
    assert {n for n, m in model.items() if type(m) is not kinds[n]} == {"plain"}
    with pytest.warns(UserWarning, match="the module .Own has a forward"):
        expose(Own(D, H))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_subclass_keeps_what_it_adds(copied):
    plain = Wider(D).double()
    module = expose(copy.deepcopy(plain))
    assert isinstance(module, Wider)
    assert isinstance(module, secondorder.nn.LSTM)
    assert type(expose(Wider(D))) is type(module)
    twin = copied(module)
    assert type(twin) is type(module)
    assert twin.width() == 2 * D
    tap_all(twin)
    assert_equal(outcome(twin, [noise(T, N, D)]), outcome(plain, [noise(T, N, D)]))


@pytest.mark.parametrize("kind", LAYERS)
def test_flattened_weights_do_no_harm_and_one_parametrized_later_is_not_computed_at_every_step(kind):
    counted = []

    class Double(nn.Module):
        def forward(self, weight):
            counted.append(1)
            return 2 * weight

    plain, seen = pair(kind)
    seen.flatten_parameters()
    for module in (seen, plain):
        module.float().double()
    doubled = {n: 2 * p for n, p in plain.state_dict().items()}
    seen.load_state_dict(doubled, assign=True)
    plain.load_state_dict(doubled)
    assert_equal(outcome(seen, [noise(T, N, D)]), outcome(plain, [noise(T, N, D)]))
    plain.weight_hh_l0.data.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(seen, "weight_hh_l0", Double())
    counts = []
    for steps in (1, T):
        counted.clear()
        found = seen(noise(steps, N, D))
        counts.append(len(counted))  # torch, too, reads them, to compare them with its list of weights
        assert_equal(flat(found), flat(plain(noise(steps, N, D))))
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["RNN", "GRUCell", "MultiheadAttention"])
def test_compiled(kind):
    plain, x = build(kind), arguments(kind)
    seen = torch.compile(expose(copy.deepcopy(plain)), backend="aot_eager")
    assert_equal(flat(seen(*x)), flat(plain(*x)))
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    assert breaks == (1 if kind in LAYERS else 0)  # torch breaks at every recurrent layer by its type
