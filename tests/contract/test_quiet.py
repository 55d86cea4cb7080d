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
from tests.support.kfac import labels, noise
from tests.support.models import fit
from tests.support.warned import messages_of, silent

PACKAGE = Path(__file__).resolve().parents[2] / "secondorder"
NAMES = ["kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt", "inverse", "lrmfac", "ksggt", "kis", "sngd"]


def plain_model():
    torch.manual_seed(0)
    head = (nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *head)


def batch(step):
    return noise(8, 1, 6, 6, seed=step, dtype=torch.float32), labels(8, 3, step)


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
    layer = nn.Linear(4, 3)
    layer.scale = nn.Parameter(torch.ones(3))
    model, opt = nn.Sequential(layer, nn.Linear(3, 2)), []
    ((text, file),) = caught(lambda: opt.append(KFAC(model)))
    assert "0.scale" in text
    assert "skip_layers" in text
    assert file == __file__
    with silent():
        fit(model, opt[0], 5, 4, steps=3)
        KFAC(model, skip_layers=["0"])


def too_large(name):
    return {"eps": 1e6} if "ggt" in name else {"damping": 1e6, "damping_mode": "absolute"}


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
    with silent():
        train_for(32, name, **too_large(name) | {option: better})


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
    preconditioner = train_for(3, name, **too_large(name)).preconditioner
    if name in ("hylo", "kis", "sngd"):
        found = [(block.bounds(), block.extremes()) for block in preconditioner.plan.blocks]
        pairs = [(bounds.undamped, truth.largest - truth.damping) for bounds, truth in found]
    else:
        solver = preconditioner.solver
        units = preconditioner.plan.units
        pairs = [(solver.bounds(unit).extremes.undamped, solver.extremes(unit)[1]) for unit in units]
    for bound, truth in pairs:
        assert (bound >= truth * (1 - 1e-5)).all()
        assert (bound <= truth * 1.5).all()


def test_a_matrix_with_one_eigenvalue_causes_no_warning_about_damping():
    model = nn.Linear(1, 1, bias=False)
    opt = KFAC(model, lr=1e-3, damping=1e-3, damping_mode="absolute", factor_update_steps=1, inv_update_steps=1)
    with silent():
        fit(model, opt, 8, 1, steps=5)
    assert set(opt.diagnostics()["condition_number"].values()) == {1.0}


def test_warnings_state_a_remedy():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)

    (text,) = messages_of(lambda: expose(nn.Sequential(Own(3, 4))))
    assert "secondorder.nn" in text
    assert "skip_layers" in text
    (text,) = messages_of(lambda: ParamScheduler(KFAC(nn.Linear(3, 2)), damping=lambda _: 0.1))
    assert "Build the optimizer with damping=" in text


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
