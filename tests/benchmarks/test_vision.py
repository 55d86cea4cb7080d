"""Workloads on pictures: invalid files are refused, and random augmentation depends on the seed only."""

import copy
import pickle
import shutil
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.runner import Trainer
from benchmarks.workloads import DataMissingError, imagenet, make_workload
from benchmarks.workloads.cifar import PADDING, random_crops
from benchmarks.workloads.imagenet import MEAN, STD, Pictures, middle_crop, random_crop
from benchmarks.workloads.mnist import Autoencoder
from benchmarks.workloads.tiny import write_photographs
from tests.support.launching import launch, torchrun


def _first(workload, count=2, seed=0):
    return list(islice(workload.batches(seed), count))


def _same(one, other):
    return all(a.equal(b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_fields_are_checked(tmp_path):
    for name, field, value, message in [
        ("resnet20", "dataset", "cifar1000", "dataset must be one of cifar10, cifar100, got 'cifar1000'"),
        ("vgg16", "augment", "crop", "augment must be one of none, flips, crops, got 'crop'"),
        ("resnet32", "label_smoothing", 1.0, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ("resnet50", "label_smoothing", -0.1, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ("resnet18", "workers", -1, "workers must be >= 0, got -1"),
        ("unet", "crop", 100, "crop must be a multiple of 8, got 100"),
        ("unet", "crop", 0, "crop must be a multiple of 8, got 0"),
        ("unet", "dice", -1.0, "dice must be >= 0 and finite, got -1.0"),
        ("autoencoder", "growth_steps", 1, "growth_steps must be 0 or at least 2, got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_workload(name, tmp_path, changes={field: value})


def test_label_smoothing_is_a_part_of_the_loss(tmp_path):
    outputs, targets = torch.randn(6, 10), torch.arange(6)
    logs = outputs.log_softmax(1)
    expected = -(0.9 * logs[range(6), targets] + 0.1 * logs.mean(1)).mean()
    for name in ("resnet20", "resnet50"):
        loss = make_workload(name, tmp_path, changes={"label_smoothing": 0.1}).criterion(outputs, targets)
        torch.testing.assert_close(loss, expected)


# ---------------------------------------------------------------------- CIFAR
def test_cifar_with_a_hundred_classes(data_dir):
    workload = make_workload("resnet32", data_dir, "smoke", changes={"dataset": "cifar100"})
    (images, labels), _ = _first(workload)
    assert images.shape == (32, 3, 32, 32)
    assert labels.max() > 10
    model = workload.build_model(0)
    assert model(images).shape == (32, 100)
    assert 0 <= workload.evaluate(model, everything=True) <= 1
    with pytest.raises(DataMissingError, match="cifar-100-python"):
        _first(replace(workload, data_dir=data_dir / "mnist"))


def test_augmentation_follows_the_seed_and_its_name(data_dir):
    flips = make_workload("resnet20", data_dir, "smoke")
    plain, crops = replace(flips, augment="none"), replace(flips, augment="crops")
    for workload in (plain, flips, crops):
        assert _same(_first(workload), _first(workload))
    ordered = plain.normalised(plain.train[0])
    first, mirrored, cropped = (_first(workload)[0][0] for workload in (plain, flips, crops))
    place = [int((ordered == image).flatten(1).all(1).nonzero()) for image in first]
    assert len(set(place)) == len(place)
    same = [bool(a.equal(b)) for a, b in zip(first, mirrored, strict=True)]
    turned = [bool(a.equal(b.flip(-1))) for a, b in zip(first, mirrored, strict=True)]
    assert all(a != b for a, b in zip(same, turned, strict=True))
    assert 5 < sum(same) < 27
    assert sum(a.equal(b) for a, b in zip(mirrored, cropped, strict=True)) < 4


def test_crops_are_shifted_by_at_most_the_padding():
    images = torch.arange(1.0, 33).expand(1000, 1, 32, 32) + 32 * torch.arange(32.0)[:, None]
    crops = random_crops(images, torch.Generator().manual_seed(0))
    shifts = {divmod(int(crop[0, PADDING, PADDING]) - 1, 32) for crop in crops}
    assert shifts == {(i, j) for i in range(2 * PADDING + 1) for j in range(2 * PADDING + 1)}
    corner = crops[:, 0, 0, 0]
    assert ((corner == 0) | (corner <= 33 * PADDING + 1)).all()


def test_a_damaged_file_of_a_hundred_classes_is_refused(tmp_path):
    for content, message in [
        ({"labels": [0, 1, 2]}, "not a CIFAR-100 batch: 'fine_labels'"),
        ({"fine_labels": [0, 1, 100]}, "must hold labels from 0 to 99, got 0 to 100"),
        ({"fine_labels": [0, 1, -1]}, "must hold labels from 0 to 99, got -1 to 1"),
        ({"fine_labels": [[0, 1, 2]]}, "train is damaged"),
    ]:
        folder = tmp_path / "cifar100" / "cifar-100-python"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("train", "test"):
            data = {"data": np.zeros((3, 3072), np.uint8), **content}
            (folder / name).write_bytes(pickle.dumps(data, protocol=2))
        with pytest.raises(ValueError, match=message):
            _first(make_workload("vgg16", tmp_path, "smoke", changes={"dataset": "cifar100"}))


# ---------------------------------------------------------------------- ImageNet
def test_pictures_do_not_depend_on_workers_or_shares(data_dir):
    workload = make_workload("resnet18", data_dir, "smoke")
    whole = _first(workload, 5)  # past the end of an epoch
    assert {tuple(images.shape) for images, _ in whole} == {(8, 3, 32, 32)}
    assert not whole[0][0].equal(whole[4][0])
    assert _same(whole[2:], list(islice(workload.batches(0, skip=2), 3)))
    parts = [list(islice(workload.batches(0, rank=rank, ranks=2), 5)) for rank in range(2)]
    joined = [tuple(torch.cat(both) for both in zip(*pair, strict=True)) for pair in zip(*parts, strict=True)]
    assert _same(whole, joined)
    with pytest.raises(ValueError, match="a batch of 8 cannot be divided evenly among 3 ranks"):
        next(workload.batches(0, ranks=3))
    before = torch.get_rng_state()
    assert _same(whole, _first(replace(workload, workers=2), 5))
    assert before.equal(torch.get_rng_state())


def test_all_held_out_pictures_or_a_part(data_dir, monkeypatch):
    monkeypatch.setattr(imagenet, "EVAL_PICTURES", 4)
    workload = make_workload("resnet50", data_dir, "smoke")
    seen = []

    class First(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return torch.eye(4)[:1].expand(len(x), 4)

    assert workload.evaluate(First()) == workload.evaluate(First(), everything=True) == 1 / 4
    assert seen == [4, 8]


def test_the_number_of_classes_can_be_chosen(data_dir, tmp_path):
    workload = make_workload("resnet18", data_dir, "smoke", changes={"classes": 2, "batch_size": 16})
    assert workload.examples == 16
    assert _first(workload, 1)[0][1].sort().values.tolist() == [0] * 8 + [1] * 8
    with pytest.raises(ValueError, match="must hold 5 classes, got 4"):
        _first(replace(workload, classes=5))
    write_photographs(tmp_path, np.random.default_rng(0), classes=3, each=4)
    few = make_workload("resnet18", tmp_path, "smoke", changes={"classes": 3})
    shutil.rmtree(tmp_path / "val" / "n00000001")
    with pytest.raises(ValueError, match=r"val/n00000001 must hold pictures \(\.jpeg, \.jpg, \.png\), got none"):
        few.evaluate(few.build_model(0))


def test_a_continued_run_only_decodes_the_pictures_that_it_trains_on(data_dir, monkeypatch):
    make = partial(torch.optim.SGD, lr=0.1)
    workload = make_workload("resnet18", data_dir, "smoke")
    whole, part = (Trainer("sgd", workload, lambda model: make(model.parameters())) for _ in range(2))
    for _ in range(5):
        whole.step()
        if len(whole.history.losses) == 3:
            part.load_state_dict(copy.deepcopy(whole.state_dict()))
    decoded, own = [], Pictures.__getitem__
    monkeypatch.setattr(Pictures, "__getitem__", lambda self, draw: decoded.append(draw) or own(self, draw))
    part.step()
    assert len(decoded) == workload.batch_size
    part.step()
    assert part.history.losses == whole.history.losses


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_photograph_is_named(workers, tmp_path):
    write_photographs(tmp_path, np.random.default_rng(0), each=4)
    for path in tmp_path.rglob("*_3.JPEG"):
        path.write_bytes(path.read_bytes()[:300])
    workload = make_workload("resnet18", tmp_path, "smoke", changes={"workers": workers})
    with pytest.raises(ValueError, match=r"_3\.JPEG is truncated or no picture"):
        _first(workload)


def test_colors_are_those_of_the_file(tmp_path):
    """This holds for all color modes of the data set: gray, CMYK, and palettes with transparency."""
    (tmp_path / "a").mkdir()
    gray = Image.new("RGB", (40, 40), (200, 200, 200))
    kinds = {"0.png": gray, "1.png": gray.convert("L"), "2.jpg": gray.convert("CMYK"), "3.PNG": gray.quantize(4)}
    for name, picture in kinds.items():
        picture.save(tmp_path / "a" / name)
    pictures = Pictures(tmp_path, ["a"], 32)
    for number in range(4):
        image, label = pictures[number, -1]
        levels = image * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        assert label == 0
        assert (levels - 200 / 255).abs().max() < 0.02


def test_random_crops_are_parts_of_the_picture():
    """Red encodes the column and green the row, so that a crop shows its position."""
    rows, columns = np.mgrid[:200, :250]
    picture = Image.fromarray(np.stack([columns, rows, 0 * rows], 2).astype(np.uint8))
    areas, ratios, mirrored = [], [], 0
    for seed in range(200):
        crop = np.asarray(random_crop(picture, 32, seed), np.float64)
        across, down = crop[0, -1, 0] - crop[0, 0, 0], crop[-1, 0, 1] - crop[0, 0, 1]
        mirrored += across < 0
        width, height = abs(across) * 32 / 31, down * 32 / 31
        areas.append(width * height / picture.width / picture.height)
        ratios.append(width / height)
    assert 0.07 < min(areas) < 0.15 < 0.8 < max(areas) < 1.05
    assert 0.7 < min(ratios) < 0.8 < 1.25 < max(ratios) < 1.42
    assert 70 < mirrored < 130


def test_crops_of_long_pictures_and_from_the_middle():
    for size in ((2, 300), (300, 2), (1, 1)):
        assert random_crop(Image.new("RGB", size), 8, 0).size == (8, 8)
        assert middle_crop(Image.new("RGB", size), 8).size == (8, 8)
    rows = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 256, 3))
    middle = np.asarray(middle_crop(Image.fromarray(rows.copy()), 224))
    assert (middle[0, 0, 0], middle[-1, 0, 0]) == (16, 239)


# ---------------------------------------------------------------------- MNIST
def test_batches_that_grow(data_dir):
    workload = replace(Autoencoder.of_size("smoke", data_dir), batch_size=4, growth_steps=7)
    sizes = [len(images) for images, _ in islice(workload.batches(0), 9)]
    assert sizes == [4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert _same(_first(workload, 4), _first(workload, 4))
    sizes = [len(images) for images, _ in islice(replace(workload, growth_steps=13).batches(0), 12)]
    assert sizes == [4, 6, 8, 8, 16, 16, 32, 40, 64, 88, 128, 176]  # multiples of 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "comm", "roles"),
    [
        (2, "chief_only", ["rank 0", "rank 1"]),
        (3, "dedicated_workers:gradient=[0], factor=[1], inverse=[2]", ["rank 1 (factor)", "rank 2 (inverse)"]),
    ],
)
def test_training_with_a_chief_and_with_dedicated_workers(ranks, comm, roles, tmp_path):
    words = ["-m", "benchmarks", "train", "--workload", "digits", "--optimizer", "kfac", "--size", "smoke"]
    words += ["--no-recipe", "--set", "lr=0.01", "graft=adam", "factor_update_steps=1", "inv_update_steps=2"]
    words += ["--steps", "8", "--batch-size", "30", "--threads", "1", "--comm", comm]
    done = launch(torchrun("--standalone", f"--nproc-per-node={ranks}", *words), tmp_path, 150)
    assert done.returncode == 0, done.stdout
    for role in roles:
        assert role in done.stdout
