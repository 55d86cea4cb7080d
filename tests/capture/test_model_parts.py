"""A model in several parts, such as the stages of a pipeline: a list of modules, each with a forward of its own.

The oracle is the same network as one ``nn.Sequential`` of its parts, trained on the same micro-batches one after the
other: same names, same steps.
"""

import copy
import functools
import pickle
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import secondorder
from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, SparseMFAC, TopK
from secondorder.capture import hooks
from secondorder.diagnostics import Analysis, read_events
from tests.support.building import built
from tests.support.grid import each
from tests.support.kfac import hook_counts
from tests.support.models import vectors
from tests.support.saving import through_a_file
from tests.support.warned import warned

EVERY = {"factor_update_steps": 1, "inv_update_steps": 1, "lr": 0.1, "damping": 0.1}
WINDOW = {"window_size": 4, "lr": 0.1}
FEW = TopK(density=0.3, block_size=64)
METHODS = {
    "kfac": functools.partial(built, KFAC, **EVERY),
    "cholesky": functools.partial(built, KFAC, inverse_method="cholesky", **EVERY),
    "reduce": functools.partial(built, KFAC, approx="reduce", **EVERY),
    "ekfac": functools.partial(built, EKFAC, **EVERY),
    "intra": functools.partial(built, EKFAC, estimator="intra", **EVERY),
    "hylo": functools.partial(built, HyLo, lr=0.1, damping=0.1, update_steps=1, mode="sngd"),
    "mfac": functools.partial(built, MFAC, damping=0.1, **WINDOW),
    "sparse_mfac": functools.partial(built, SparseMFAC, damping=0.1, compression=FEW, **WINDOW),
    "ggt": functools.partial(built, GGT, **WINDOW),
}
LAYERED = ["kfac", "cholesky", "reduce", "ekfac", "intra", "hylo"]
#: One of each kind of state: factors, scales, rows, a window, a window with a moment.
KINDS = ["kfac", "ekfac", "hylo", "mfac", "ggt"]
pytestmark = pytest.mark.filterwarnings("error")


def make_parts(tied=False):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
    second = nn.Sequential(nn.Tanh(), nn.Linear(6, 6, bias=not tied), nn.Tanh(), nn.Linear(6, 3))
    if tied:
        first[2] = nn.Linear(6, 6, bias=False)
        second[1].weight = first[2].weight
    return [first.double(), second.double()]


def micro_batches(step, count=3):
    x, y = vectors(4 * count, 5, seed=step)
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def whole(model, batches):
    """Accumulation with one module."""
    for x, y in batches:
        (F.cross_entropy(model(x), y) / len(batches)).backward()


def outputs_of(parts, x):
    """The parts one after the other, in one graph."""
    return functools.reduce(lambda z, part: part(z), parts, x)


def chained(parts, batches):
    whole(functools.partial(outputs_of, parts), batches)


def judged(second, z, y, number):
    """In a pipeline, the second part sees a leaf, so that each part has a backward pass of its own."""
    leaf = z.detach().requires_grad_()
    return z, leaf, F.cross_entropy(second(leaf), y) / number


def finish(z, leaf, value):
    value.backward()
    z.backward(leaf.grad)


def all_forwards_first(parts, batches):
    """GPipe: backwards in the opposite order."""
    first, second = parts
    for begun in reversed([judged(second, first(x), y, len(batches)) for x, y in batches]):
        finish(*begun)


def one_forward_one_backward(parts, batches):
    """The next micro-batch enters before the last one has left."""
    (first, second), last = parts, None
    for x, y in batches:
        z = first(x)
        if last is not None:
            finish(*last)
        last = judged(second, z, y, len(batches))
    finish(*last)


LOOPS = {"chained": chained, "gpipe": all_forwards_first, "1f1b": one_forward_one_backward}
#: All orders for methods that count examples or calls differently; the most revealing order for the others.
ORDERS = [(m, loop) for m in METHODS for loop in (LOOPS if m in ("kfac", "intra", "hylo") else ["gpipe"])]
orders = pytest.mark.parametrize(("method", "loop"), ORDERS)


def train(opt, model, run, steps=3):
    for step in range(steps):
        opt.zero_grad()
        run(model, micro_batches(step))
        opt.step()


def shapes(optimizer):
    """The state, with the shapes of tensors instead of their values."""
    states = optimizer.state_dict()["state"].items()
    return {(i, key): getattr(value, "shape", value) for i, state in states for key, value in state.items()}


def assert_same(found, expected):
    """Parameters, names and state."""
    for group, other in zip(found.param_groups, expected.param_groups, strict=True):
        assert group["param_names"] == other["param_names"]
        torch.testing.assert_close(group["params"], other["params"], rtol=1e-12, atol=1e-12)
    assert shapes(found) == shapes(expected)


def assert_steps_as_one(method, run, tied=False):
    """A loop over parts takes the steps of one module with accumulation."""
    parts, model = make_parts(tied), nn.Sequential(*make_parts(tied))
    found, expected = METHODS[method](parts), METHODS[method](model)
    assert list(found.blocks) == list(expected.blocks)
    train(found, parts, run)
    train(expected, model, whole)
    assert_same(found, expected)
    for name in ("0.0", "1.3"):
        a, b = found.dense_curvature(name), expected.dense_curvature(name)
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    return found


@orders
def test_parts_step_as_the_one_module_does(method, loop):
    assert_steps_as_one(method, LOOPS[loop])


@each(method=LAYERED, loop=LOOPS.keys())
def test_a_layer_that_two_parts_share_counts_as_in_one_module(method, loop):
    assert list(assert_steps_as_one(method, LOOPS[loop], tied=True).blocks) == ["0.0", "0.2", "1.3"]


@pytest.mark.parametrize("interval", [1, 100])
def test_a_pass_of_the_model_is_prepared_once_and_one_of_a_part_by_itself_too(interval, monkeypatch):
    model, x = nn.Sequential(*make_parts()), torch.randn(4, 5, dtype=torch.float64)
    optimizer = KFAC(model, lr=0.0, damping=0.1, factor_update_steps=interval, inv_update_steps=interval)
    for _ in range(2):  # the next step is due only with an interval of 1
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    prepare = Mock()
    monkeypatch.setattr(hooks, "prepare", prepare)
    model(x)
    assert prepare.call_count == 1
    model[0](x)
    assert prepare.call_count == 2
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, :2])
    model(x)
    assert prepare.call_count == 4  # the pass that failed has ended


def assert_alike(make, take_step):
    """Three steps with several parts, and the same with one module."""
    found = []
    for parts in (make_parts(), [nn.Sequential(*make_parts())]):
        opt = make(parts if len(parts) > 1 else parts[0])
        for step in range(3):
            opt.zero_grad()
            take_step(opt, parts, step)
        found.append(opt)
    assert_same(*found)
    return found


@each(fisher=["mc", "exact"], method=["kfac", "ekfac"])
def test_observe_takes_the_outputs_of_the_last_part(fisher, method):
    def take_step(opt, parts, step):
        for x, y in micro_batches(step):
            outputs = outputs_of(parts, x)
            opt.observe(outputs, "categorical")
            (F.cross_entropy(outputs, y) / 3).backward()
        opt.step()

    assert_alike(functools.partial(METHODS[method], fisher=fisher), take_step)


def test_damping_adapts_by_the_loss_of_all_parts():
    def take_step(opt, parts, step):
        ((x, y),) = micro_batches(step, 1)

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(outputs_of(parts, x), y)
            loss.backward()
            return loss

        opt.step(closure)

    make = functools.partial(METHODS["kfac"], adaptive_damping=True, damping_interval=1)
    first, second = (opt.param_groups[0]["damping"] for opt in assert_alike(make, take_step))
    assert first == pytest.approx(second)
    assert first != 0.1


@pytest.mark.skipif(
    "_PipelineScheduleRuntime" not in [base.__name__ for base in ScheduleInterleaved1F1B.__mro__],
    reason="in torch 2.8 a rank sends to itself from stage to stage, which gloo refuses",
)
@pytest.mark.parametrize("method", ["kfac", "hylo"])
@pytest.mark.filterwarnings("default:.*:FutureWarning", "default:.*:UserWarning:torch")
def test_the_schedules_of_torch_drive_several_stages(method, group_of_one):
    """By default they scale gradients afterwards, which statistics cannot take into account."""
    widths = [torch.zeros(4, n, dtype=torch.float64) for n in (5, 6)]

    @functools.cache
    def schedule_of(*parts):
        stages = [PipelineStage(parts[i], i, 2, torch.device("cpu"), input_args=(widths[i],)) for i in range(2)]
        return ScheduleInterleaved1F1B(stages, 3, loss_fn=lambda o, y: F.cross_entropy(o, y) / 3, scale_grads=False)

    def scheduled(parts, batches):
        x, y = (torch.cat(some) for some in zip(*batches, strict=True))
        schedule_of(*parts).step(x, target=y)

    assert_steps_as_one(method, scheduled)


@pytest.mark.parametrize("method", KINDS)
def test_state_goes_from_parts_to_one_module_and_back(method):
    """The parts are given as a list of modules in addition to named parameters."""
    parts, model = make_parts(), nn.Sequential(*make_parts())
    named = [(f"{i}.{n}", p) for i, part in enumerate(parts) for n, p in part.named_parameters()]
    split, joint = METHODS[method](named, module=tuple(parts)), METHODS[method](model)
    train(split, parts, chained, 2)
    state, weights = through_a_file([split.state_dict(), [p.state_dict() for p in parts]])
    for part, own in zip(model, weights, strict=True):
        part.load_state_dict(own)
    joint.load_state_dict(state)
    train(split, parts, chained, 2)
    train(joint, model, whole, 2)
    assert_same(joint, split)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "hylo"])
def test_a_list_is_detached_and_copies_are_attached_to_others(method):
    parts = make_parts()
    before = [hook_counts(part) for part in parts]
    opt = METHODS[method](parts)
    opt.detach()
    assert [hook_counts(part) for part in parts] == before
    opt.attach(parts)
    train(opt, parts, chained, 2)
    assert all(opt.state[b.owner]["refreshes"] == 2 for b in opt.blocks.values())
    copies = [copy.deepcopy((parts, opt)), pickle.loads(pickle.dumps((parts, opt)))]
    train(opt, parts, chained, 1)
    for other_parts, other in copies:
        with pytest.raises(RuntimeError, match="attach"):
            other.step()
        other.attach(other_parts)
        train(other, other_parts, chained, 1)
        assert_same(other, opt)


def test_every_method_is_created_from_a_list():
    """Parts may be compiled, layers may be skipped, and a ``ModuleList`` is one module."""
    for name in ("kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt"):
        assert "1.3.weight" in secondorder.create(name, make_parts(), lr=0.01).describe()
    make, names, parts = METHODS["kfac"], ["0.0", "0.2", "1.1", "1.3"], make_parts()
    assert list(make([torch.compile(part, backend="eager") for part in parts]).blocks) == names
    opt = make(layers := nn.ModuleList(make_parts()))
    assert list(opt.blocks) == names
    assert opt.module is layers
    with warned():
        assert list(make(parts, skip_layers=["1.*"]).blocks) == names[:2]
        assert list(make(parts, skip_layers=[parts[0]]).blocks) == names[2:]


def test_analysis_watches_parts(tmp_path):
    parts = make_parts()
    opt = METHODS["kfac"](parts)
    with Analysis(opt, tmp_path, ("rank",), every=1):
        train(opt, parts, chained, 2)
    events = list(read_events(tmp_path / "rank.jsonl"))
    assert {event["layer"] for event in events} == set(opt.blocks)
    assert {event["m"] for event in events} == {12}


def on_two_devices(part):
    wrapped = nn.DataParallel(part)
    wrapped.device_ids = [0, 1]
    return wrapped


JUDGED = {"adaptive_damping": True, "likelihood": "categorical"}
REFUSED = [
    (lambda parts: {"params": [], "module": []}, ValueError, "empty list"),
    (lambda parts: {"params": parts, "module": parts[:1]}, ValueError, "give the module once"),
    (lambda parts: {"params": [*parts, parts[0]]}, ValueError, "part 0 of the list of modules is part 2"),
    (lambda parts: {"params": [*parts, parts[1][3]]}, ValueError, "part 2 .* is part 1 or inside it"),
    (lambda parts: {"params": parts[0].parameters(), "module": [*parts, 3]}, TypeError, "a list with int"),
    (lambda parts: {"params": parts[0].parameters(), "module": "net"}, TypeError, "got str"),
    (lambda parts: {"params": [on_two_devices(parts[0])]}, NotImplementedError, "DataParallel"),
    (lambda parts: {"params": parts, **JUDGED}, NotImplementedError, "likelihood="),
]


def test_invalid_lists_of_parts_are_refused():
    for given, kind, text in REFUSED:
        parts = make_parts()
        with pytest.raises(kind, match=text):
            built(KFAC, **given(parts))
        assert not any(m._forward_hooks or m._forward_pre_hooks for part in parts for m in part.modules())
