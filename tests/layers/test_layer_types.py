"""Every kind of layer: its factors, dense block and direction are those of explicit rows.

The definitions are in `tests/support/layer_cases.py`: the same network without its modules, one example at a time.
"""

import pytest
import torch
from torch import nn

from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, plain_kfac, train_step, twin
from tests.support.layer_cases import CASES, ONE_OF_EACH, RECURRENCE, LayerCase, conv, parameters_of
from tests.support.networks import TRANSPOSED
from tests.support.oracles.kfac import solve_exact, solve_pi
from tests.support.oracles.layers import Tape, follows_fallback, row_of, step_of


def check_definition(case: LayerCase) -> None:
    """Its outputs are those of torch, and so are its gradients, the means over examples of Σ g aᵀ."""
    model, (inputs, y) = case.model(), case.data()
    outputs = model(*inputs)
    by_hand = torch.cat([model.by_hand(Tape(), *example) for example in case.by_hand()])
    assert_close(by_hand.detach(), outputs.detach(), 1e-12)
    case.loss(outputs, y).backward()
    for block, groups in case.rows(model).items():
        mean = torch.cat([rows.mean_gradient() for rows in groups])
        assert_close(mean, case.matrix(model, block, lambda p: p.grad), 1e-10, block)


@pytest.mark.parametrize("name", CASES)
def test_factors_are_those_of_the_definition(name):
    """Outputs and gradients have the same bits as without the optimizer."""
    case = CASES[name]
    check_definition(case)
    inputs, y = case.data()
    for approx in ("expand",) if case.expand_only else ("expand", "reduce"):
        model = case.ready(case.model())
        plain = twin(model)
        opt = plain_kfac(model, approx=approx, **case.keywords)
        exact = {} if case.exposed else {"rtol": 0, "atol": 0}
        outputs = [network(*inputs) for network in (model, plain)]
        torch.testing.assert_close(*outputs, **exact)
        for output in outputs:
            case.loss(output, y).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **exact)
        opt.step()
        case.check(opt, case.factors(case.model(), approx))


def output_exists(axes, kernel, stride, dilation, padding, output_padding, **_):
    """For inputs of two pixels per axis; torch requires the output padding to be below the stride or the dilation."""
    return (
        output_padding < max(stride, dilation) and stride - 2 * padding + dilation * (kernel - 1) + output_padding >= 0
    )


@pairs(
    output_exists, axes=[1, 2, 3], kernel=[1, 2, 3], stride=[1, 2, 3], dilation=[1, 2], padding=[0, 1, 3],
    output_padding=[0, 1, 2], groups=[1, 2], trained=["both", "weight", "bias"], approx=["expand", "reduce"],
)  # fmt: skip
def test_transposed_convolutions_of_every_option(
    axes, kernel, stride, dilation, padding, output_padding, groups, trained, approx
):
    options = {"stride": stride, "dilation": dilation, "padding": padding, "output_padding": output_padding}
    sizes = (2 * groups, 3 * groups, kernel)
    case = conv(TRANSPOSED[axes], sizes, {"groups": groups, **options}, (2,) * axes)
    model, (inputs, y) = case.model(), case.data()
    for name, p in model.conv.named_parameters():
        p.requires_grad_(trained in ("both", name))
    expected = case.factors(twin(model), approx)
    opt = plain_kfac(model, approx=approx)
    train_step(opt, model, inputs, y, case.loss)
    case.check(opt, expected)


@each(
    name=ONE_OF_EACH,
    way={
        "eigen": ({"inverse_method": "eigen"}, solve_exact),
        "eigen-pi": ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
        "cholesky": ({"inverse_method": "cholesky"}, solve_pi),
    },
)
def test_the_direction_is_the_dense_solve(name, way):
    case, (keywords, solve) = CASES[name], way
    expected = case.factors(case.model())
    model, (inputs, y) = case.ready(case.model()), case.data()
    opt = plain_kfac(model, damping=0.02, **keywords, **case.keywords)
    case.loss(model(*inputs), y).backward()
    before = {block: case.matrix(model, block) for block in expected}
    gradients = {block: case.matrix(model, block, lambda p: p.grad.clone()) for block in expected}
    opt.step()
    for block, (A, B) in expected.items():
        gradient, moved = gradients[block], before[block] - case.matrix(model, block)
        assert_close(moved, solve(B, A, gradient, 0.02).view_as(gradient), 1e-8, block)
        assert float((moved - gradient).abs().max()) > 1e-3 * float(gradient.abs().max())


@pairs(name=[name for name in ONE_OF_EACH if not CASES[name].tables], frozen=["weight", "bias"])
def test_a_frozen_part_has_no_rows(name, frozen):
    case = CASES[name]

    def freeze(model: nn.Module) -> nn.Module:
        for block in case.rows(model):
            _, weight, bias = parameters_of(model, block)
            part = weight if frozen == "weight" else bias
            if block != "head" and part is not None and bias is not None:
                part.requires_grad_(False)
        return model

    expected = case.factors(freeze(case.model()))
    model, (inputs, y) = case.ready(freeze(case.model())), case.data()
    opt = plain_kfac(model, **case.keywords)
    train_step(opt, model, inputs, y, case.loss)
    case.check(opt, expected)


SPLITTABLE = [name for name in ONE_OF_EACH if CASES[name].examples is None and not CASES[name].positions_first]


@pytest.mark.parametrize("name", [*SPLITTABLE, "experts"])
def test_micro_batches_do_not_matter(name):
    """An example that does not reach an expert has no row and no gradient there: it counts in B, but not in A."""
    case = CASES[name]
    expected = case.factors(case.model())
    model, (inputs, y) = case.ready(case.model()), case.data()
    opt = plain_kfac(model)
    for target, *part in zip(y.split(2), *(x.split(2) for x in inputs), strict=True):
        (case.loss(model(*part), target) / 2).backward()
    opt.step()
    case.check(opt, expected)


@pytest.mark.parametrize("name", [name for name in RECURRENCE if "-" not in name or "cell" in name])
def test_a_layer_that_is_not_exposed_follows_the_fallback_and_names_expose(name):
    case, model = CASES[name], CASES[name].model()
    with pytest.warns(UserWarning, match="expose"):
        opt = plain_kfac(model, lr=0.1)
    inputs, y = case.data()
    case.loss(model(*inputs), y).backward()
    prefix, layer = next(model.named_children())
    for (gradient, moved), (key, _) in zip(
        step_of(opt, list(layer.parameters())), layer.named_parameters(), strict=True
    ):
        assert follows_fallback(opt, f"{prefix}.{key}", "expose")
        assert_close(moved, 0.1 * gradient)


@pytest.mark.parametrize(
    "name", ["attention", "attention-positions-first", "gru", "lstm-two-layers-bidirectional", "transposed-1d-stride"]
)
@pytest.mark.filterwarnings("ignore:.*it is not certain how many examples")
def test_one_example_without_a_batch_axis(name):
    case = CASES[name]
    expected = case.factors(case.model(), number=1)
    model, y = case.ready(case.model()), case.data()[1]
    opt = plain_kfac(model)
    case.loss(model(*(x[0] for x in case.inputs())), y[0]).backward()
    opt.step()
    case.check(opt, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["shared-2d", "shared-table-other-padding"])
def test_compiled(name):
    """Layers may be frozen before the backward, although its graph contains taps that no longer exist."""
    case, model = CASES[name], CASES[name].model()
    expected, (inputs, y) = case.factors(case.model()), case.data()
    opt = plain_kfac(model, lr=0.0)
    fast = torch.compile(model, backend="aot_eager")
    train_step(opt, fast, inputs, y, case.loss)
    case.check(opt, expected)
    loss = case.loss(fast(*inputs), y)
    model.head.requires_grad_(False)
    model(*inputs)  # with the next forward, the optimizer inspects the model again
    assert set(opt.blocks) == set(expected) - {"head"}
    loss.backward()


def test_describe_names_the_block_and_the_sizes_of_its_groups():
    opt = plain_kfac(CASES["transposed-1d-groups"].model())
    assert "conv" in row_of(opt, "conv.weight")
    assert "2×7, 3" in row_of(opt, "conv.weight")
