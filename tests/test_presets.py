"""Presets equal the calls that they print, and groups of hidden matrices contain the parameters that Muon trains."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secondorder
from secondorder import EKFAC, KFAC, HyLo, MemOpt, matrix_groups
from secondorder.methods.presets import PRESETS
from tests.support.code_blocks import DOCS, ROOT
from tests.support.kfac import noise
from tests.support.models import mlp
from tests.support.quadratic import flat

NAMES = list(PRESETS)
PAGE = DOCS / "choose-a-method.md"


class Tiny(nn.Module):
    """A decoder with word and position embeddings, attention, norms and a head."""

    def __init__(self, tied=False):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.norm(self.layer(self.words(x) + self.places)))


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Ignore the warning that the position embeddings belong to no layer."""


def network(outputs=1):
    return mlp((6, 5, outputs))


def trained(preset, optimizer, model, steps=3):
    """Train as the preset asks for, and return the parameters."""
    inputs, targets = noise(8, 6), noise(8, 1, seed=1)

    def closure():
        optimizer.zero_grad()
        outputs = model(inputs)
        if preset.options.get("fisher") == "exact":
            optimizer.observe(outputs, "gaussian")
        classified = outputs.shape[1] > 1
        loss = F.cross_entropy(outputs, torch.arange(8) % 3) if classified else (outputs - targets).square().mean()
        loss.backward()
        return (loss, outputs) if "closure" in preset.needs else loss

    with optimizer:
        for _ in range(steps):
            optimizer.step(closure)
    return flat(model.parameters())


@pytest.mark.parametrize("changes", [{}, {"lr": 0.01, "eps": 1e-6, "comm": None}], ids=["as it is", "changed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_equals_the_call_that_it_prints(name, changes):
    preset = secondorder.presets()[name]
    model, twin = (network(3 if name == "large_batch" else 1) for _ in range(2))
    start = flat(model.parameters())
    built = secondorder.create(name, model, **changes)
    written = eval(preset.call(**changes), {**vars(secondorder), "model": twin})
    assert repr(built) == repr(written)
    found = trained(preset, built, model)
    assert torch.equal(found, trained(preset, written, twin))
    assert found.isfinite().all()
    assert not torch.equal(found, start)


def test_str_is_the_call_without_changes():
    assert str(PRESETS["from_adamw"]) == "KFAC(model, lr=0.001, weight_decay=0.01, graft='adamw', budget=2.0)"
    assert all(str(preset) == preset.call() for preset in PRESETS.values())


def test_the_table_names_each_preset_with_its_call_and_a_section_of_the_documentation():
    text = str(secondorder.presets())
    for name, preset in PRESETS.items():
        assert all(part in text for part in (name, preset.summary, str(preset), preset.needs, preset.measured))
        assert preset.summary.endswith(".")
        page, section = preset.measured.split(", ", 1)
        assert f"# {section}\n" in (ROOT / page).read_text(), preset.measured
    secondorder.presets().clear()
    assert list(secondorder.presets()) == NAMES, "a change of the table changes the presets"


@pytest.mark.parametrize(("name", "kind"), [("from_adamw", KFAC), ("From-Muon", EKFAC), ("LOW_MEMORY", HyLo)])
def test_names_of_presets_are_case_insensitive(name, kind):
    with secondorder.create(name, network()) as optimizer:
        assert type(optimizer) is kind


def test_keywords_of_the_caller_replace_those_of_the_preset():
    with secondorder.create("from_adamw", network(), 3e-4, weight_decay=0.1, comm="mem_opt") as optimizer:
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["graft"]) == (3e-4, 0.1, "adamw")
        assert isinstance(optimizer.comm, MemOpt)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: secondorder.create("from_sgd", network().parameters()), TypeError,
            r"'from_sgd' needs the model itself, got generator.*KFAC\(model, lr=0.1",
        ),
        (lambda: secondorder.create("from_adamw", network(), dampning=0.1), TypeError, "dampning"),
        (
            lambda: matrix_groups(network(), lr=0.1, head="top"), ValueError,
            "head='top' names no layer with a matrix: choose from 0, 2",
        ),
        (
            lambda: matrix_groups(network(), lr=0.1, adjust_lr_fn="spectral"), ValueError,
            "adjust_lr_fn must be one of .*, got 'spectral'",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


# ---------------------------------------------------------------------- groups of matrices
def names(model, group):
    of = {id(p): name for name, p in model.named_parameters()}
    return {of[id(p)] for p in group["params"]}


def test_hidden_matrices_are_those_that_muon_trains_with_their_biases():
    model = Tiny()
    hidden, others = matrix_groups(model, lr=0.02)
    assert names(model, hidden) == {
        f"layer.{name}"
        for name in (
            *("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight"),
            *("self_attn.out_proj.bias", "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
        )
    }
    assert names(model, hidden) | names(model, others) == {name for name, _ in model.named_parameters()}
    assert (hidden["lr"], hidden["orthogonalize"]) == (0.02, True)
    assert (others["lr"], others["momentum"]) == (0.01, 0.9)
    assert "orthogonalize" not in others


def test_layers_without_a_matrix_are_not_hidden():
    layers = [
        nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 4, 2, groups=4), nn.Linear(4, 1), nn.LayerNorm((4, 4)),
    ]  # fmt: skip
    hidden = [nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 2), nn.Linear(1, 4), nn.Linear(4, 4, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(1, 4, bias=False), *hidden, nn.Linear(4, 4))
    found, _ = matrix_groups(model, lr=0.02)
    assert [id(p) for p in found["params"]] == [id(p) for layer in hidden for p in layer.parameters()]


def test_others_have_further_options():
    *_, others = matrix_groups(Tiny(), lr=0.02, others_momentum=0.7, others={"weight_decay": 0.1, "graft": "adamw"})
    assert (others["momentum"], others["weight_decay"], others["graft"]) == (0.7, 0.1, "adamw")
    options = {"others_lr": 0.3, "others": {"weight_decay": 0.1, "params": []}}
    with secondorder.create("orthogonal_momentum", Tiny(), **options) as optimizer:
        hidden, others = optimizer.param_groups
    assert (hidden["graft"], hidden["inv_update_steps"], hidden["momentum_mode"]) == (None, 0, "pre")
    assert (others["graft"], others["inv_update_steps"], others["lr"]) == ("adamw", 0, 0.3)
    assert (others["weight_decay"], len(others["params"])) == (0.1, 9)  # the options of the caller are added
    with secondorder.create("from_muon", Tiny(), lr=0.5, others_lr=None) as optimizer:
        assert optimizer.param_groups[-1]["lr"] == 0.25


def test_every_parameter_is_in_one_group_even_if_layers_share_it():
    model = Tiny(tied=True)
    groups = matrix_groups(model, lr=0.02, head=None)
    params = [p for group in groups for p in group["params"]]
    assert len(params) == len(set(map(id, params))) == len(list(model.parameters()))
    assert "words.weight" in names(model, groups[-1])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    hidden, others = matrix_groups(model, lr=0.1)
    assert [tuple(p.shape) for p in hidden["params"]] == [(4, 4), (4,), (4,)]
    assert [tuple(p.shape) for p in others["params"]] == [(2, 4), (2,)]


def test_the_head_may_be_named_or_left_out():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    assert names(model, matrix_groups(model, lr=0.1)[0]) == {"0.weight", "0.bias"}
    assert names(model, matrix_groups(model, lr=0.1, head="0")[0]) == {"2.weight", "2.bias"}
    assert len(matrix_groups(model, lr=0.1, head=None)) == 1


def test_rates_of_muon_in_its_original_scale_give_steps_of_the_same_length():
    """The ratio of the rates equals the ratio of the steps of torch.optim.Muon with its two adjustments."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 12), nn.Linear(12, 6), nn.Linear(6, 2)).double()
    groups = matrix_groups(model, lr=0.01, adjust_lr_fn="original")
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for layer in model[:3]:
        moved = {}
        for scale in ("original", "match_rms_adamw"):
            weight = nn.Parameter(torch.zeros_like(layer.weight))
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).double()
            torch.optim.Muon([weight], lr=0.01, weight_decay=0.0, adjust_lr_fn=scale).step()
            moved[scale] = weight.detach().norm()
        ratio = moved["original"] / moved["match_rms_adamw"]
        torch.testing.assert_close(torch.tensor(rates[id(layer.weight)] / 0.01).double(), ratio)


def test_the_page_shows_the_current_presets():
    """`python -m tests.test_presets` updates the table."""
    text = PAGE.read_text()
    assert text == with_table(text)


def with_table(text):
    """Return the text of the page with a current table of the presets between its two comments."""
    lines = ["| preset | for | call | in the training loop |", "|---|---|---|---|"]
    lines += [f"| `{p.name}` | {p.summary} | `{p}` | {p.needs or 'nothing new'} |" for p in PRESETS.values()]
    start, end = "<!-- presets -->", "<!-- end of presets -->"
    before, rest = text.split(start)
    return "\n".join([before + start, "", *lines, "", end + rest.split(end)[1]])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
