"""Logistic regression on a file of features, and the command that makes one of a network."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.commands.features import Features as FeaturesCommand
from benchmarks.commands.features import feature_arrays, last_inputs
from benchmarks.workloads import DataMissingError, make_workload
from benchmarks.workloads.feature_files import read_features
from benchmarks.workloads.features import Features
from benchmarks.workloads.logistic import Logistic


def _save(path, **arrays):
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"inputs": rng.normal(size=(40, 3)), "targets": rng.integers(0, 4, 40)}


def test_a_file_may_be_named_in_three_ways(tmp_path, arrays):
    path = _save(tmp_path / "features" / "mine.npz", **arrays)
    _save(tmp_path / "features" / "other.npz", inputs=np.ones((50, 2)), targets=np.zeros(50, int))
    for name in ("", "mine", "mine.npz", str(path)):
        workload = make_workload("features", tmp_path, batch_size=4, changes={"features": name} if name else None)
        assert next(workload.batches(0))[0].shape == (4, 3)
        assert workload.build_model(0).weight.shape == (4, 3)
    assert next(make_workload("logistic", tmp_path, batch_size=4, changes={"features": "other"}).batches(0))[
        0
    ].shape == (4, 2)


def test_every_tenth_example_is_held_out_where_none_are(tmp_path, arrays):
    (inputs, targets), held = read_features(_save(tmp_path / "f.npz", **arrays))
    assert held[0].equal(torch.from_numpy(arrays["inputs"][9::10]).float())
    assert held[1].equal(torch.from_numpy(arrays["targets"][9::10]))
    assert (inputs.shape, targets.dtype) == ((36, 3), torch.int64)
    more = {"test_inputs": arrays["inputs"][:5], "test_targets": arrays["targets"][:5]}
    own, held = read_features(_save(tmp_path / "f.npz", **arrays, **more))
    assert (len(own[0]), len(held[0])) == (40, 5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"inputs": None}, "must hold both inputs and targets, got one"),
        ({"inputs": None, "targets": None}, "must hold inputs and targets, got neither"),
        ({"test_inputs": np.ones((2, 3))}, "must hold both test_inputs and test_targets"),
        ({"inputs": np.ones((40, 3, 1))}, r"inputs must be finite numbers \[count, features\], got \(40, 3, 1\)"),
        ({"inputs": np.full((40, 3), np.nan)}, "inputs must be finite"),
        ({"targets": np.zeros(39, int)}, r"targets must be 40 classes from 0 on, got int64 \(39,\)"),
        ({"targets": np.zeros(40)}, "got float64"),
        ({"targets": np.full(40, -1)}, "classes from 0 on"),
        ({"test_inputs": np.ones((2, 5)), "test_targets": np.zeros(2, int)}, "inputs must be some of shape 3"),
        ({"inputs": np.array(["a"] * 40)}, "must be finite numbers"),
        ({"inputs": np.array([{}] * 40)}, "must be an .npz file of arrays"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, arrays, change, why):
    kept = {name: value for name, value in {**arrays, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=why):
        read_features(_save(tmp_path / "f.npz", **kept))


def test_what_is_no_file_of_arrays_is_refused(tmp_path):
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 a broken archive")
    with pytest.raises(ValueError, match=r"f\.npz must be an \.npz file"):
        read_features(tmp_path / "f.npz")
    with pytest.raises(DataMissingError, match=r"features lacks \*\.npz.*python -m benchmarks features.*<data-dir>"):
        next(Features(tmp_path).batches(0))
    with pytest.raises(DataMissingError, match="lacks mine"):
        next(Logistic(tmp_path, features="mine").batches(0))


def test_a_better_fit_classifies_better(data_dir):
    workload = Features.smoke(data_dir)
    model, batches = workload.build_model(0), workload.batches(0)
    before = workload.evaluate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
    assert workload.evaluate(model) > max(before, 0.7)
    assert replace(workload, batch_size=16).examples == 128


def test_the_stream_of_the_random_features_is_what_it_was(data_dir):
    """Figures of evidence hang on it."""
    model = Logistic(data_dir).build_model(3)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, 784, generator=generator) / 784**0.5
    assert model[0].weight.equal(weight)
    assert model[0].bias.equal(torch.rand(2000, generator=generator))
    torch.manual_seed(3)
    assert model[1].weight.equal(torch.nn.Linear(2000, 10).weight)


def test_what_the_last_layer_sees():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    x = torch.randn(5, 2)
    with last_inputs(model) as seen:
        model(x)
    model(x)
    assert len(seen) == 1
    torch.testing.assert_close(model[2](seen[0]), model(x))


def test_the_command_writes_what_the_workload_reads(data_dir, tmp_path, capsys):
    out = tmp_path / "deep" / "images"  # no ending is added
    command = FeaturesCommand(data_dir=data_dir, size="smoke", steps=3, threads=torch.get_num_threads(), out=out)
    assert command.run() == 0
    assert f"features: {out}" in capsys.readouterr().out
    workload = make_workload("features", data_dir, "smoke", changes={"features": str(out)})
    assert (workload.examples, len(workload._test[0])) == (5 * 64, 64)
    images = make_workload("resnet20", data_dir, "smoke")
    labels = torch.cat([labels for _, labels in images.in_order(train=True)])
    assert workload._train[1].equal(labels)
    assert workload._train[0].shape == (320, 16)
    assert workload._train[0].min() >= 0  # behind a ReLU


def test_the_features_are_those_of_the_trained_model(data_dir):
    images = make_workload("resnet20", data_dir, "smoke")
    model = images.build_model(0)
    arrays = feature_arrays(model, images, torch.device("cpu"))
    model.eval()
    first, _ = next(images.in_order(train=False))
    logits = torch.from_numpy(arrays["test_inputs"]) @ model[-1].weight.T + model[-1].bias
    torch.testing.assert_close(logits, model(first))


def test_bad_calls_of_the_command(data_dir, tmp_path):
    with pytest.raises(ValueError, match="--steps must be at least 1, got 0"):
        FeaturesCommand(data_dir=data_dir, steps=0).run()
    threads = torch.get_num_threads()
    diverging = FeaturesCommand(
        data_dir=data_dir, size="smoke", steps=5, threads=threads, optimizer="sgd", set=("lr=1e30",), out=tmp_path / "f"
    )
    assert diverging.run() == 1
    assert not (tmp_path / "f").exists()
