"""Every line of the documentation that creates an optimizer trains when it replaces AdamW in a script."""

import ast
import re
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import secondorder
from secondorder.methods.names import METHODS
from tests.support.code_blocks import DOCS, PAGES

START = re.compile(r"\b(?:secondorder\.create|KFAC|EKFAC|HyLo|MFAC|SparseMFAC|GGT)\(")
#: Keywords that need no other change of the script. Lines with other keywords need a certain loss or loop.
PLAIN = {"lr", "momentum", "weight_decay", "graft", "budget"}
PLAIN |= {"damping", "damping_mode", "window_size", "inverse_method"}
#: Values of the script.
NAMES = {"LR": 3e-3, "WD": 1e-2, "secondorder": secondorder, "torch": torch, **vars(secondorder)}
MODEL = {"model", "model.parameters()"}


def call_at(text):
    """Return the complete expression at the start of a text, or None."""
    for match in re.finditer(r"\)", text):
        with suppress(SyntaxError):
            return ast.parse(text[: match.end()], mode="eval").body
    return None


def is_plain(call):
    if not isinstance(call, ast.Call) or not call.args or ast.unparse(call.args[-1]) not in MODEL:
        return False
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    keywords = {keyword.arg for keyword in call.keywords}
    return "physics" not in ast.unparse(call) and names <= {*NAMES, "model"} and keywords <= PLAIN


@cache
def lines():
    """Return the distinct lines of all pages."""
    pages = [page for page in PAGES if page.name == "README.md" or DOCS in page.parents]
    every = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    calls = [call_at(line[match.start() :]) for line in every for match in START.finditer(line)]
    return list(dict.fromkeys(ast.unparse(call) for call in calls if is_plain(call)))


@cache
def ends(line, steps=96):
    """Train a small classifier, and return its first loss and the mean of its last ten."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 20)
    labels = (inputs[:, :10].square().sum(1) > inputs[:, 10:].square().sum(1)).long()
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = eval(line, {**NAMES, "model": model})
    losses = []
    for x, y in zip(inputs.repeat(steps // 8, 1).split(64), labels.repeat(steps // 8).split(64), strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], sum(losses[-10:]) / 10


def bound(line):
    """Return the loss that a line has to reach: that of the optimizer whose rate it uses, or of AdamW's defaults."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in ast.parse(line, mode="eval").body.keywords}
    rate, graft = keywords.get("lr"), keywords.get("graft", "'adamw'" if "from_adam" in line else "")
    if graft == "'sgd'" or "from_sgd" in line:
        script = f"torch.optim.SGD(model.parameters(), lr={rate or 0.1}, momentum=0.9)"
    else:
        script = f"torch.optim.AdamW(model.parameters(), lr={rate if graft and rate else 1e-3})"
    start, end = ends(script)
    # Rows that keep a hundredth of the entries converge more slowly in a run of this length (see the page on M-FAC).
    return start - 0.3 * (start - end) if "Sparse" in line else end


def test_there_are_lines_of_every_method():
    names = {line.split("(")[0] for line in lines()}
    assert names >= {kind.__name__ for kind in METHODS.values()} | {"secondorder.create"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lines_reach_the_loss_of_the_line_that_they_replace():
    found = {line: ends(line)[1] for line in lines()}
    assert not {line: (end, bound(line)) for line, end in found.items() if end > bound(line) + 0.01}
