"""The number of examples in a forward pass: models whose own forward is not called, and inputs that do not show it.

The oracle passes one example after the other through the model or the script, and collects rows in float64.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC, BatchOptions, HyLo
from secondorder.capture.batch import Input, Use, count_examples
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.kfac import all_factors, assert_factors, held_factors, labels, noise, plain_kfac
from tests.support.models import Net, mlp, seeded_build
from tests.support.networks import Cell, applied, masked, scanned
from tests.support.oracles.kfac import covered_names, expected_factors
from tests.support.warned import messages_of, silent

WIDTH, CLASSES, N, T = 64, 10, 24, 7


class Coder(nn.Module):
    """An encoder that flattens examples and positions, and a decoder on examples."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if encoder is None else encoder
        self.inner, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, CLASSES))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.encoder(x))).mean(1)

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def flattened(net: Any, x: Tensor) -> Tensor:
    """A layer on ``[N·T, d]`` inside a part of the model that takes ``[N, T, d]``."""
    return torch.tanh(net.layer(x.reshape(-1, WIDTH))).view(len(x), -1, WIDTH)


def flattening() -> Coder:
    return Coder(Net(flattened, layer=nn.Linear(WIDTH, WIDTH)))


class Twice(Coder):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(self.encoder(x))))).mean(1)


def by_parts(model: Any, x: Tensor) -> Tensor:
    return model.decode(model.encode(x))


def timed() -> Net:
    """``model(t, x)``, with one time for all examples or one for each."""
    return Net(
        lambda net, t, x: net.head(torch.tanh(net.trunk(x) + net.time(t.reshape(-1, 1)))),
        time=nn.Linear(1, WIDTH), trunk=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def decoded(net: Any, x: Tensor) -> Tensor:
    """A layer encodes, and a part decodes several samples for each example."""
    return net.decoder(net.encoder(x).expand(5, -1, -1))


def samples() -> Net:
    return Net(decoded, encoder=nn.Linear(4, 3), decoder=nn.Sequential(nn.Linear(3, CLASSES)))


def recurrent(body: type[nn.LSTM], function: Callable[[Any, Tensor], Tensor]) -> Net:
    return Net(function, table=nn.Embedding(9, 6), body=body(6, 5), head=nn.Linear(5, CLASSES))


def positions_first(net: Any, x: Tensor) -> Tensor:
    """Takes tokens ``[T, N]``, as recurrent and attention layers do by default."""
    return net.head(net.body(net.table(x))[0])


def turning(net: Any, x: Tensor) -> Tensor:
    """Takes tokens ``[N, T]`` and turns them for its recurrent layer."""
    return net.head(net.body(net.table(x).transpose(0, 1))[0].transpose(0, 1))


def translation() -> Net:
    """An encoder and a decoder on ``[T, N]`` and ``[T - 2, N]``."""
    return Net(
        lambda net, x: net.head(net.body(net.table(x), net.table(x[:-2]))),
        table=nn.Embedding(9, 8), head=nn.Linear(8, CLASSES), body=nn.Transformer(8, 2, 1, 1, 16, dropout=0.0),
    )  # fmt: skip


class Detector(nn.Module):
    """Takes a list of images ``[3, H, W]``, whose pixels are also targets, and returns losses, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(2).mT).flatten(0, 1)

    def forward(self, images: list[Tensor]) -> dict[str, Tensor]:
        batch = torch.stack(images)
        targets = (10 * batch[:, 0]).abs().long() % CLASSES
        return {"loss": F.cross_entropy(self.logits(batch), targets.flatten())}


class Regions(Detector):
    """Has a head that takes the regions of all images as rows."""

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(2).mT.flatten(0, 1))


def projected() -> Net:
    """A trunk, and a projector that only scripts call."""
    trunk, projector = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return Net(lambda net, x: torch.tanh(net.trunk(x)), trunk=trunk, projector=projector)


def rolled_out(model: Any, x: Tensor) -> Tensor:
    """Every layer is called equally often, but on its own results, so this is one forward."""
    state, outputs = x.new_zeros(len(x), WIDTH), []
    for t in range(T):
        state = torch.tanh(model.trunk(state) + x[:, t])
        outputs.append(model.projector(state))
    return torch.stack(outputs, 1).mean(1)


def previewed(model: Any, x: Tensor) -> Tensor:
    return model.projector(torch.tanh(model.trunk(x))) + 0.0 * model(x)[:, :1].detach()


def turned(model: Any, x: Tensor) -> Tensor:
    return model(x.mT).transpose(0, 1)


ROWS, SEQUENCES, TOKENS = noise(N, WIDTH), noise(N, T, WIDTH), torch.arange(28).view(4, 7) * 5 % 9
#: A model, a script that calls it or its layers, a batch, and the layers whose factors are those of single examples.
SCRIPTS: dict[str, tuple[Any, Callable[[Any, Tensor], Tensor], Tensor, list[str] | None]] = {
    "parts": (Coder, by_parts, SEQUENCES, None),
    "flattened in a part": (flattening, by_parts, SEQUENCES, None),
    "two calls": (Twice, by_parts, SEQUENCES, None),
    "layers over time": (projected, rolled_out, SEQUENCES, None),
    "a cell over time": (Cell, lambda cell, x: scanned(cell, x.transpose(0, 1)).transpose(0, 1), noise(12, 6, 4), None),
    "single examples": (
        lambda: mlp((4, CLASSES)), lambda model, x: torch.stack([model(row) for row in x]), noise(12, 4), None,
    ),
    "samples": (samples, lambda model, x: model(x).transpose(0, 1), noise(9, 4), None),
    "samples by parts": (samples, lambda model, x: decoded(model, x).transpose(0, 1), noise(9, 4), None),
    "a projector after the model": (projected, lambda model, x: model.projector(model(x)), ROWS, None),
    "a preview before the model": (projected, previewed, ROWS, ["projector"]),  # the trunk is called twice
    "a mask first": (masked, lambda model, x: model(noise(6, 6, seed=3), x), noise(5, 6, 4), None),
    "one time first": (timed, lambda model, x: model(noise(1), x), ROWS, ["trunk", "head"]),
    "times first": (timed, lambda model, x: model(x[:, 0], x), ROWS, ["trunk", "head"]),
    "attention": (translation, turned, TOKENS, ["head", "body.encoder.layers.0.linear1"]),
    "a layer that is not exposed": (lambda: recurrent(nn.LSTM, positions_first), turned, TOKENS, None),
    "images": (Detector, lambda model, x: model(list(x))["loss"], noise(6, 3, 8, 8), None),
}  # fmt: skip
SPLIT = ("parts", "flattened in a part", "two calls", "a cell over time")


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten()) if outputs.ndim else outputs


def fits(script: str, approx: str, size: int, compiled: bool) -> bool:
    """Some scripts run with micro-batches, and one is compiled."""
    plain = (approx, size) == ("expand", N)
    return plain and script == "one time first" if compiled else plain or script in SPLIT


@pairs(fits, script=SCRIPTS.keys(), approx=["expand", "reduce"], size=[N, 7], compiled=[False, True])
@pytest.mark.filterwarnings("ignore:.*follow the fallback", "ignore:.*expose")
@pytest.mark.usefixtures("fresh_compiler")
def test_factors_of_micro_batches_are_those_of_single_examples(
    script: str, approx: str, size: int, compiled: bool
) -> None:
    build, function, x, layers = SCRIPTS[script]
    whole, model = applied(seeded_build(build), function), seeded_build(build)
    shape = whole(x).shape[:-1]
    y = labels(shape.numel(), CLASSES).view(shape) if shape else x  # losses need no targets
    names = covered_names(whole) if layers is None else [f"model.{name}" for name in layers]
    opt, root = plain_kfac(model, approx=approx), torch.compile(model, backend="aot_eager") if compiled else model
    with silent():
        for some_x, some_y in zip(x.split(size), y.split(size), strict=True):
            (loss_of(function(root, some_x), some_y) * len(some_x) / len(x)).backward()
        opt.step()
    found = {name: held_factors(opt, model, name.removeprefix("model.")) for name in names}
    assert_factors(found, expected_factors(whole, x, y, loss_of, names, approx))


def trained(build: Any, run: Callable[[Any, Any], Tensor], cls: Any, **keywords: Any) -> dict[str, Tensor]:
    """The parameters after a step for a loss."""
    often = {"update_steps": 1, "rank_fraction": 1.0} if cls is HyLo else {"factor_update_steps": 1}
    model = seeded_build(build)
    opt = built(cls, model, lr=1.0, momentum=0.0, damping=0.1, kl_clip=None, **often, **keywords)
    run(model, opt).backward()
    opt.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pairs(
    lambda cls, fisher, sizes, **_: fisher == "empirical" or (cls is KFAC and sizes != (N, 10)),
    script=["parts", "flattened in a part"], sizes=[(N,), (N, N), (N, 10)], cls=[KFAC, EKFAC, HyLo],
    fisher=["empirical", "exact"],
)  # fmt: skip
def test_several_batches_of_parts_before_one_backward(script: str, sizes: Any, cls: Any, fisher: str) -> None:
    """The step is that of batches of the forward; one of them may be shorter."""
    batches = [noise(n, T, WIDTH, seed=n + i) for i, n in enumerate(sizes)]

    def run(model: Any, opt: Any, forward: Any) -> Tensor:
        outputs = torch.cat([forward(model, x) for x in batches])
        opt.observe(outputs, "categorical")
        return F.cross_entropy(outputs, labels(len(outputs), CLASSES))

    ways = [partial(run, forward=by_parts), partial(run, forward=lambda model, x: model(x))]
    found, expected = (trained(SCRIPTS[script][0], way, cls, fisher=fisher) for way in ways)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_part_that_is_not_trained_does_not_count() -> None:
    """The generator has another batch than the discriminator."""
    widths = (WIDTH, WIDTH, CLASSES)
    model = nn.ModuleDict({"generator": mlp((5, WIDTH, WIDTH)), "discriminator": mlp(widths)})
    opt = plain_kfac(model.discriminator.parameters(), module=model)
    x, y = torch.cat([noise(N, WIDTH), model.generator(noise(N, 5)).detach()]), labels(2 * N, CLASSES)
    F.cross_entropy(model.discriminator(x), y).backward()
    opt.step()
    assert_factors(all_factors(opt, model.discriminator), expected_factors(mlp(widths), x, y, F.cross_entropy))


@pytest.mark.parametrize("frozen", [False, True], ids=["forward given up", "layers frozen"])
def test_earlier_forwards_do_not_count(frozen: bool) -> None:
    """One was given up, or one of a part came before layers were frozen, which renews the hooks."""
    x, y, model = SEQUENCES, labels(N, CLASSES), seeded_build(Coder)
    opt = plain_kfac(model)
    if frozen:
        model.encode(x)
        model.decoder.requires_grad_(False)
    else:
        model(noise(5, T, WIDTH))  # its output is gone
    expected = expected_factors(copy.deepcopy(model), x, y, F.cross_entropy)
    F.cross_entropy(model(x) if frozen else by_parts(model, x), y).backward()
    opt.step()
    assert ("decoder.0" in opt.blocks) == (not frozen)
    found = {name: held_factors(opt, model, name) for name in opt.blocks}
    assert_factors(found, {name: expected[name] for name in found})


def test_numbers_of_rows_that_are_not_multiples_warn_once() -> None:
    model, found = seeded_build(Coder), []
    opt = plain_kfac(model)
    for _ in range(2):
        opt.zero_grad()
        rows = (*model.inner(noise(24, WIDTH)), *model.inner(noise(7, WIDTH)), *model.decoder(noise(24, WIDTH)))
        sum(row.square().mean() for row in rows).backward()
        found += messages_of(opt.step)
    (text,) = found
    assert "how many examples a forward pass of Coder has: a layer of it was called with 7 and with 24 rows" in text


def messages(net: Any, edge_index: Tensor, x: Tensor, members: Tensor) -> Tensor:
    """Nodes that pass messages, and one output per node or per graph."""
    source, target = edge_index
    for layer in (net.first, net.second):
        x = torch.tanh(layer(x + torch.zeros_like(x).index_add(0, target, x[source])))
    if net.pooled:
        x = x.new_zeros(int(members.max()) + 1, WIDTH).index_add(0, members, x)
    return net.head(x)


def factor_of(build: Any, layer: str, y: Tensor, *args: Any) -> Tensor:
    """``Σ g gᵀ / N`` at a layer, by autograd."""
    model, outputs = seeded_build(build), []
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: outputs.append(output))
    (g,) = torch.autograd.grad(F.cross_entropy(model(*args), y, reduction="sum"), outputs)
    return g.T @ g / len(y)


def captured_factor(build: Any, layer: str, y: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """The same from the state of an optimizer."""
    model = seeded_build(build)
    opt = plain_kfac(model, **keywords)
    F.cross_entropy(model(*args), y).backward()
    opt.step()
    return opt.state[model.get_submodule(layer).weight]["factor_g"]


@pairs(nodes=[38, 235], pooled=[True, False], edges_first=[True, False])
def test_graphs(nodes: int, pooled: bool, edges_first: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Node-wise outputs count nodes, and pooled ones graphs; neither counts the two ends of an edge."""
    edges = torch.randint(nodes, (2, 4 * nodes), generator=torch.Generator().manual_seed(0))
    x, members = noise(nodes, WIDTH), torch.arange(nodes) * 9 // nodes
    y, args = labels(9 if pooled else nodes, CLASSES), (edges, x, members) if edges_first else (x, edges, members)

    def build() -> Net:
        first, second, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        forward = partial(messages, edge_index=edges, x=x, members=members)
        return Net(lambda net, *given: forward(net), first=first, second=second, head=head, pooled=pooled)

    B = factor_of(build, "second", y, *args)
    torch.testing.assert_close(captured_factor(build, "second", y, *args), B, rtol=1e-9, atol=1e-14)
    assert not recwarn.list


class Ambiguous(nn.Module):
    """None of its inputs and layers has as many rows as there are losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, offsets: Tensor, x: Tensor) -> Tensor:
        return torch.stack([rows.sum(0) for rows in torch.tanh(self.layer(x)).split(offsets.diff().tolist())])


def sizes(offsets: Tensor, x: Tensor) -> int:
    return len(offsets) - 1


ARGUMENTS = torch.tensor([0, 3, 11]), noise(11, WIDTH).float()


def test_batch_input_decides_the_number_of_examples() -> None:
    offsets, x, y = torch.tensor([0, 3, 5, 10, 11]), noise(11, WIDTH), labels(4, CLASSES)
    B = factor_of(Ambiguous, "layer", y, offsets, x)
    for rule, n in (("offsets", 5), ("x", 11), (sizes, 4)):
        with silent():
            found = captured_factor(Ambiguous, "layer", y, offsets, x, batch_input=rule)
        torch.testing.assert_close(found.trace(), B.trace() * n / 4, rtol=1e-9, atol=0)
    assert messages_of(lambda: captured_factor(Ambiguous, "layer", y, offsets, x))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": lambda: recurrent(secondorder.nn.LSTM, lambda net, x: positions_first(net, x).flatten(0, 1)),
    "unexposed": lambda: recurrent(nn.LSTM, positions_first), "turning": lambda: recurrent(nn.LSTM, turning),
    "attention": translation, "images": Detector, "regions of images": Regions,
}  # fmt: skip


@pairs(case=[*KINDS], count=[2, 3, 20], cls=[KFAC, EKFAC, HyLo])
def test_layers_contradict_the_size_of_the_first_input(
    case: str, count: int, cls: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """The first axis counts time steps or the channels of an image, and the user need not say so."""
    x: Any = torch.randint(9, (7, count), generator=torch.Generator().manual_seed(0))
    if case == "turning":
        x = x.T
    if "images" in case:
        x = list(noise(count, 3, 8, 8))

    def run(model: Any, opt: Any) -> Tensor:
        outputs = model(x)
        if "images" in case:
            return outputs["loss"]
        return F.cross_entropy(outputs.flatten(0, -2), labels(outputs.shape[:-1].numel(), CLASSES))

    explicit = {"batch_input": len} if case == "turning" or "images" in case else {"batch_dim": 1}
    found, expected = (trained(KINDS[case], run, cls, **options) for options in ({}, explicit))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not [w for w in recwarn if "examples" in str(w.message)]


def passing() -> Net:
    """Also returns its input, which it has not computed."""
    return Net(lambda net, x: (x, net.layer(x)), layer=nn.Linear(4, 4))


def with_context(differentiated: bool) -> Net:
    """Has a recurrent layer on a context that all examples share, which may be called inside of a transform."""

    def forward(net: Any, x: Tensor, context: Tensor) -> Tensor:
        if differentiated:
            _, states = torch.func.jvp(lambda c: net.context(c)[0], (context,), (context,))
        else:
            states, _ = net.context(context)
        return net.layer(x) + states.mean(1)

    return Net(forward, context=nn.GRU(4, 4, batch_first=True), layer=nn.Linear(4, 4))


def of_one_backbone(model: nn.Module, opt: KFAC) -> Tensor:
    features = noise(8, 4).requires_grad_() * 2
    return model(features)[1] + model(3 * features)[1]


def with_masks_of_their_own(model: nn.Module, opt: KFAC) -> Tensor:
    state, outputs = torch.zeros(5, 3, dtype=torch.float64), []
    for x, keep in zip(noise(2, 5, 4), (torch.ones(5, 1), torch.tensor([1.0, 1, 0, 0, 0])[:, None]), strict=True):
        with opt.mask(keep.bool()):
            output, state = model(x, state)
        outputs.append(output)
    return torch.stack(outputs)


def gpt() -> nn.ModuleDict:
    body = nn.Sequential(nn.Linear(4, 3))
    return nn.ModuleDict({"places": nn.Embedding(6, 4), "words": nn.Embedding(9, 4), "encoder": body})


def places_first(model: nn.Module, opt: KFAC) -> Tensor:
    places = model.places(torch.arange(6))
    return model.encoder(model.words(torch.arange(48).view(8, 6) % 9) + places)


@pytest.mark.parametrize(
    ("kind", "run", "examples"),
    [
        (passing, lambda model, opt: model(torch.cat([model(noise(8, 4))[1], noise(8, 4, seed=1)]))[1], 24),
        (passing, of_one_backbone, 16),
        (lambda: with_context(False), lambda model, opt: model(noise(7, 4), noise(1, 7, 4)), 7),
        (lambda: with_context(True), lambda model, opt: model(noise(7, 4), noise(1, 5, 4)), 7),
        (Cell, with_masks_of_their_own, 10),
        (gpt, places_first, 8),
    ],
)
@pytest.mark.filterwarnings("ignore:.*follow the fallback")
def test_calls_that_only_look_like_others(kind: Any, run: Any, examples: int) -> None:
    """Batches that depend on an earlier one are no rollout, and neither a context nor positions are the examples."""
    model = seeded_build(kind)
    opt = plain_kfac(model)
    run(model, opt).square().mean().backward()
    assert opt.capture.take().total == examples


def test_a_rule_survives_copies() -> None:
    for kind in (KFAC, EKFAC, HyLo):
        opt = built(kind, Ambiguous(), lr=0.1, batch_input=sizes)
        for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
            model = Ambiguous()
            twin.attach(model)
            F.cross_entropy(model(*ARGUMENTS), labels(2, CLASSES)).backward()
            assert twin.capture.take().total == 2


def test_a_rule_that_cannot_be_followed_is_refused() -> None:
    model = Ambiguous()
    for rule, error, text in (
        ("y", ValueError, "is no argument of the forward of Ambiguous"),
        (3, TypeError, "batch input must be the name of an argument of forward or a function, got 3"),
    ):
        with pytest.raises(error, match=text):
            KFAC(model, lr=0.1, batch=BatchOptions(input=rule))
    opt = KFAC(model, lr=0.1, batch=BatchOptions(input=lambda offsets, x: 2.5))
    with pytest.raises(TypeError, match=r"the batch input must return an int, got 2\.5"):
        model(*ARGUMENTS)
    opt.close()


FLOATS, WORDS = False, True
#: Inputs, outputs, inputs of layers, and the number of examples.
DECISIONS = {
    "plain": ([((8, 5), FLOATS)], [(8, 3)], [(8, 5)], 8),
    "tokens, flattened for the head": ([((8, 6), WORDS)], [(48, 3)], [(8, 6, 5), (48, 5)], 8),
    "everything flattened": ([((2, 6), WORDS)], [(12, 3)], [(12, 5)], 2),
    "a loss alone": ([((8, 6), WORDS)], [()], [(8, 6, 5)], 8),
    "positions before the examples": ([((8, 6), WORDS)], [(6, 8, 3)], [(6, 8, 5)], 8),
    "one example": ([((1, 6, 5), FLOATS)], [(6, 3)], [(6, 5)], 1),
    "gray pictures at one time": ([((1,), FLOATS), ((8, 1, 4, 4), FLOATS)], [(8, 1, 4, 4)], [(1, 1), (8, 1, 4, 4)], 8),
    "targets as an argument": ([((8, 6), WORDS), ((48,), WORDS)], [(48, 3)], [(8, 6, 5), (48, 5)], 8),
    "proposals": ([((8, 3, 9, 9), FLOATS)], [(37, 4)], [(8, 3, 9, 9), (37, 5)], 8),
    "two towers": ([((8, 5), FLOATS), ((40, 5), FLOATS)], [(8, 40)], [(8, 5), (40, 5)], 8),
    "views": ([((16, 5), FLOATS)], [(8, 3)], [(16, 5), (8, 10)], 8),
    "no input": ([], [(8, 3)], [(24, 5), (8, 5)], 8),
    "a scalar first": ([((), FLOATS), ((8, 5), FLOATS)], [(8, 3)], [(8, 5)], 8),
    "empty": ([((0, 5), FLOATS)], [(0, 3)], [(0, 5)], 0),
    "in doubt": ([((5,), WORDS)], [(4, 3)], [(11, 5)], 5),
    "a mask first": ([((6, 6), FLOATS), ((8, 6), WORDS)], [(8, 6, 3)], [(8, 6), (8, 6, 5)], 8),
    "times first": ([((6,), FLOATS), ((8, 6, 5), FLOATS)], [(8, 6, 3)], [(8, 6, 5)], 8),
    "two sequences": ([((7, 6, 4), FLOATS), ((6, 3), FLOATS)], [(6, 7, 2)], [(7, 6, 4), (6, 3), (7, 6, 5)], 7),
    "places second": ([((8, 6), WORDS), ((6,), WORDS)], [(6, 8, 3)], [(8, 6), (6, 8, 5)], 8),
}


def test_decision() -> None:
    doubts = {"in doubt": "its first input has 5, most of its layers have 11, its outputs have 4"}
    for case, (inputs, outputs, layers, n) in DECISIONS.items():
        uses = [Use(i, shape, None, len(shape) == 1, False, 1, False) for i, shape in enumerate(layers)]
        found = count_examples([Input(*x) for x in inputs], outputs, uses, 0)
        assert (found.n, found.doubt) == (n, doubts.get(case, "")), case
