"""Warnings appear once and state a remedy; a normal run has no warnings and no output."""

import ast
import copy
import logging
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import KFAC, ParamScheduler, create
from secondorder.methods.names import METHODS, resolve
from secondorder.nn import expose
from tests.support.building import grouped
from tests.support.models import fit

PACKAGE = Path(__file__).resolve().parents[2] / "secondorder"
NAMES = ["kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt", "inverse", "lrmfac", "ksggt", "kis", "sngd"]


def plain_model():
    torch.manual_seed(0)
    head = (nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *head)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train_for(steps, name, **settings):
    model = plain_model()
    opt = create(name, model, lr=1e-3, **grouped(METHODS[resolve(name).method], settings))
    for step in range(steps):
        opt.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("name", NAMES)
def test_a_normal_run_neither_warns_nor_logs(name, caplog, capsys):
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, "secondorder"):
        warnings.simplefilter("error")
        model = plain_model()
        opt = create(name, model, lr=1e-3, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-3, total_steps=16)
        for step in range(12):
            x, y = batch(step)
            for half in (slice(0, 4), slice(4, 8)):  # accumulation
                (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        opt.diagnostics(), opt.describe(), opt.memory_usage()
        other = create(name, plain_model(), lr=1e-3, weight_decay=1e-4)
        other.load_state_dict(opt.state_dict())
        copied = copy.deepcopy((model, opt))
        copied[1].attach(copied[0])
        opt.close()
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert capsys.readouterr() == ("", "")


def caught(action):
    """Texts and files of all warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [(str(w.message), w.filename) for w in found]


def test_parameters_without_curvature_are_named_once_with_the_file_of_the_caller():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.ones(3))

    model, opt = nn.Sequential(Scaled(), nn.Linear(3, 2)), []
    ((text, file),) = caught(lambda: opt.append(KFAC(model)))
    assert "0.scale" in text
    assert "skip_layers" in text
    assert file == __file__
    assert caught(lambda: fit(model, opt[0], 5, 4, steps=3)) == []
    assert caught(lambda: KFAC(model, skip_layers=["0"])) == []


def too_large(name):
    if "ggt" in name:
        return {"eps": 1e6}
    return {"damping": 1e6, "damping_mode": "absolute"}


@pytest.mark.parametrize("name", NAMES)
def test_damping_that_hides_all_curvature_is_reported_once_with_a_better_value(name):
    found = caught(lambda: train_for(32, name, **too_large(name)))
    ((text, file),) = [(text, file) for text, file in found if "hides the curvature" in text]
    option = "eps" if "ggt" in name else "damping"
    assert f"{option}=1e+06" in text
    assert "only rescales the gradient" in text
    assert file == __file__
    better = float(text.split(f"Try {option}=")[1].split(",")[0].rstrip("."))
    assert 1e-5 < better < 100
    assert caught(lambda: train_for(32, name, **too_large(name) | {option: better})) == []


@pytest.mark.parametrize(("name", "split"), [("kfac", "exact"), ("kfac", "pi"), ("ekfac", None), ("inverse", "pi")])
def test_bounds_of_factors_are_not_below_the_largest_eigenvalue(name, split):
    opt = train_for(3, name, **({"damping_split": split} if split else {}))
    for block in opt.preconditioner.plan.blocks:
        bounds = block.bounds()
        truth = torch.linalg.eigvalsh(opt.dense_curvature(block.name).double())[-1]
        assert bounds.undamped.amax() >= truth * (1 - 1e-5)
        assert (bounds.largest >= bounds.undamped).all()


@pytest.mark.parametrize("name", ["hylo", "kis", "sngd", "mfac", "sparse_mfac", "ggt"])
def test_bounds_of_rows_are_slightly_above_the_largest_eigenvalue(name):
    opt = train_for(3, name, **too_large(name))
    plan, pairs = opt.preconditioner.plan, []
    if name in ("hylo", "kis", "sngd"):
        for block in plan.blocks:
            truth = block.extremes()
            pairs.append((block.bounds().undamped, truth.largest - truth.damping))
    else:
        solver = opt.preconditioner.solver
        pairs = [(solver.bounds(unit).extremes.undamped, solver.extremes(unit)[1]) for unit in plan.units]
    for bound, truth in pairs:
        assert (bound >= truth * (1 - 1e-5)).all()
        assert (bound <= truth * 1.5).all()


def test_a_matrix_with_one_eigenvalue_causes_no_warning_about_damping():
    model = nn.Linear(1, 1, bias=False)
    opt = KFAC(model, lr=1e-3, damping=1e-3, damping_mode="absolute", factor_update_steps=1, inv_update_steps=1)
    assert caught(lambda: fit(model, opt, 8, 1, steps=5)) == []
    assert set(opt.diagnostics()["condition_number"].values()) == {1.0}


def test_warnings_state_a_remedy():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)

    (found,) = caught(lambda: expose(nn.Sequential(Own(3, 4))))
    assert "secondorder.nn" in found[0]
    assert "skip_layers" in found[0]
    opt = KFAC(nn.Linear(3, 2))
    (found,) = caught(lambda: ParamScheduler(opt, damping=lambda _: 0.1))
    assert "Build the optimizer with damping=" in found[0]


def test_the_package_logs_by_its_own_name_and_never_prints():
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py")  # a command line prints
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        assert function not in {"print", "pprint", "logging.warning", "logging.info", "logging.basicConfig"}
        assert not function.startswith(("sys.stdout", "sys.stderr"))
        if function == "logging.getLogger":
            assert ast.literal_eval(node.args[0]).split(".")[0] == "secondorder"
        if function == "warnings.warn":
            assert {keyword.arg for keyword in node.keywords} >= {"stacklevel"}
