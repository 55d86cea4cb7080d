"""Every workload: a seed decides weights and batches, missing data is named, and the sizes are the published ones."""

import numpy as np
import pytest
import torch

from benchmarks.workloads import WORKLOADS, DataMissingError, chargpt, make_workload
from benchmarks.workloads.mnist import read_labels
from benchmarks.workloads.tiny import write_idx

FILES = {
    "autoencoder": ("mnist", "train-images-idx3-ubyte.gz", "mnist"),
    "resnet20": ("cifar10", "data_batch_1", "cs.toronto.edu"),
    "chargpt": ("shakespeare", "input.txt", "char-rnn"),
    "logistic": ("mnist", "train-labels-idx1-ubyte.gz", "mnist"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_seed_decides_weights_and_batches(name, data_dir):
    workload = make_workload(name, data_dir, "smoke")
    (model, batch), (same, same_batch), (other, other_batch) = (
        (workload.build_model(seed), next(workload.batches(seed))) for seed in (0, 0, 1)
    )
    weights = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert batch[0].equal(same_batch[0])
    assert batch[1].equal(same_batch[1])
    assert not batch[0].equal(other_batch[0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_building_and_drawing_leave_the_global_generator_alone(name, data_dir):
    workload = make_workload(name, data_dir, "smoke")
    before = torch.get_rng_state()
    workload.build_model(0)
    next(workload.batches(0))
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_few_steps_lower_the_loss(name, data_dir):
    workload = make_workload(name, data_dir, "smoke")
    model, batch = workload.build_model(0), next(workload.batches(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    assert model.training
    assert isinstance(workload.evaluate(model), float)
    assert model.training


@pytest.mark.parametrize("name", FILES)
def test_missing_data_says_what_and_where(name, tmp_path):
    folder, file, origin = FILES[name]
    with pytest.raises(DataMissingError) as caught:
        next(make_workload(name, tmp_path).batches(0))
    assert isinstance(caught.value, FileNotFoundError)
    for part in (str(tmp_path / folder), file, origin, "<data-dir>"):
        assert part in str(caught.value)


def test_cifar_pack_is_told_how_to_unpack(tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    (folder / "pack.npz").touch()
    with pytest.raises(DataMissingError, match="standard folder only"):
        next(make_workload("resnet20", tmp_path).batches(0))
    (folder / "unpack_pack.py").touch()
    with pytest.raises(DataMissingError, match=r"unpack_pack\.py .*pack\.npz <out>/cifar10"):
        next(make_workload("resnet20", tmp_path).batches(0))


@pytest.mark.parametrize("inside", ["", "cifar10", "cifar10/cifar-10-batches-py"])
def test_cifar_folder_may_be_given_directly(inside, data_dir):
    next(make_workload("resnet20", data_dir / inside, "smoke").batches(0))


def test_a_batch_larger_than_the_data_is_refused(data_dir):
    with pytest.raises(ValueError, match="batch_size must be at most"):
        next(make_workload("autoencoder", data_dir, batch_size=100_000).batches(0))


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    path = tmp_path / "labels.gz"
    for labels in ([1, 2, 3], [1, 10]):
        write_idx(path, np.array(labels, np.uint8))
        with pytest.raises(ValueError, match="must hold 2 labels from 0 to 9"):
            read_labels(path, 2)


def test_logistic_regression_is_convex_in_what_is_trained(data_dir):
    """The features are no parameters, and along any line between two weights the loss is convex."""
    workload = make_workload("logistic", data_dir, "smoke")
    model, batch = workload.build_model(0).double(), next(workload.batches(0))
    batch = (batch[0].double(), batch[1])
    assert [tuple(p.shape) for p in model.parameters()] == [(10, 64), (10,)]
    ends = [[torch.randn_like(p) for p in model.parameters()] for _ in range(2)]

    def loss_at(t):
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), *ends, strict=True):
                p.copy_(a.lerp(b, t))
            return workload.loss(model, batch).item()

    assert loss_at(0.5) < (loss_at(0.0) + loss_at(1.0)) / 2


def test_all_of_the_held_out_text_in_parts_gives_the_mean_over_its_windows(data_dir, monkeypatch):
    workload = make_workload("chargpt", data_dir, "smoke")
    model = workload.build_model(0)
    whole = workload.evaluate(model, everything=True)
    monkeypatch.setattr(chargpt, "EVAL_WINDOWS", 3)
    assert workload.evaluate(model, everything=True) == pytest.approx(whole)
    assert workload.evaluate(model) != whole


def test_published_sizes(data_dir):
    """Parameter counts: the autoencoder's and ResNet-20's from the layer widths, the transformer's by hand."""
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    autoencoder = sum((a + 1) * b for a, b in zip(widths, widths[1:], strict=False))
    assert _count(make_workload("autoencoder", data_dir)) == autoencoder == 2_837_314
    assert _count(make_workload("resnet20", data_dir)) == 269_722
    assert _count(make_workload("logistic", data_dir)) == 2000 * 10 + 10
    vocabulary = len(set((data_dir / "shakespeare" / "input.txt").read_text()))
    layer = 4 * (128 + 1) * 128 + (128 + 1) * 512 + (512 + 1) * 128 + 2 * 2 * 128
    embeddings = (vocabulary + 128) * 128
    expected = 4 * layer + embeddings + 2 * 128 + (128 + 1) * vocabulary
    assert _count(make_workload("chargpt", data_dir)) == expected


def _count(workload):
    return sum(p.numel() for p in workload.build_model(0).parameters())
