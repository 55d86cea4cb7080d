"""U-Net: crops fit their labels and come from training images only, and Dice agrees with its definition."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.workloads import make_workload
from benchmarks.workloads.unet import HELD_OUT, IMAGES, MEAN, STD, soft_dice


def _write(folder, image, label=None):
    """Write pictures and labels from functions of their number; by default, labels are the dark pixels."""
    for name, make in (("image", image), ("label", label or (lambda number: np.where(image(number) < 100, 0, 255)))):
        (folder / "membrane" / name).mkdir(parents=True)
        for number in range(IMAGES):
            Image.fromarray(make(number).astype(np.uint8)).save(folder / "membrane" / name / f"{number}.png")
    return make_workload("unet", folder, "smoke")


def _pixels(batch):
    return (batch[0] * STD + MEAN).mul(255).round()


def test_turned_and_mirrored_crops_keep_their_labels(tmp_path):
    workload = _write(tmp_path, lambda number: np.random.default_rng(number).integers(0, 200, (40, 40)))
    for batch in islice(workload.batches(0), 16):
        assert batch[0].shape == batch[1].shape == (4, 1, 32, 32)
        assert (_pixels(batch) < 100).float().equal(batch[1])
        assert 0.4 < batch[1].mean() < 0.6


def test_all_positions_and_orientations_are_drawn(tmp_path):
    """The value of a pixel encodes its position, so a crop shows its corner and its orientation."""
    places = np.arange(36)[:, None] + 5 * np.arange(36)[None, :]
    workload = replace(_write(tmp_path, lambda _: places), batch_size=500)
    crops = _pixels(next(workload.batches(0)))[:, 0]
    rights, downs = crops[:, 0, -1] - crops[:, 0, 0], crops[:, -1, 0] - crops[:, 0, 0]
    assert set(zip(rights.tolist(), downs.tolist(), strict=True)) == {
        pair for a in (-31, 31) for b in (-155, 155) for pair in ((a, b), (b, a))
    }
    corners = {float(c.min()) for c in crops}
    assert {float(places[i, j]) for i in range(5) for j in range(5)} == corners


def test_held_out_images_are_never_trained_on(tmp_path):
    workload = replace(_write(tmp_path, lambda number: np.full((32, 32), number)), batch_size=600)
    numbers = _pixels(next(workload.batches(3))).mean((1, 2, 3)).unique()
    assert numbers.tolist() == list(range(IMAGES - HELD_OUT))


def test_dice_on_all_tiles_or_a_part(tmp_path):
    """A model that predicts membrane everywhere has 2 s / (1 + s), where s is the share of membrane."""
    label = np.full((70, 70), 255)
    label[:8, :32] = 0  # a quarter of the first of four tiles
    workload = _write(tmp_path, lambda _: np.zeros((70, 70)), lambda _: label)
    everything = nn.Sequential(nn.Conv2d(1, 1, 1))
    nn.init.constant_(everything[0].weight, 0.0)
    nn.init.constant_(everything[0].bias, 1.0)
    assert workload.evaluate(everything, everything=True) == pytest.approx(2 / 17, rel=1e-3)
    share = 2 / 5 / 4  # two of the tiles 0, 5, 10, 15 and 20 are the first of their image
    assert workload.evaluate(everything) == pytest.approx(2 * share / (1 + share), rel=1e-3)
    assert everything.training


def test_dice_is_added_to_the_loss_with_its_weight(tmp_path):
    outputs = torch.tensor([[0.3, -2.0], [1.5, 0.0]], dtype=torch.float64)[:, None, None]
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)[:, None, None]
    plain, with_dice = (make_workload("unet", tmp_path) for _ in range(2))
    with_dice = replace(with_dice, dice=0.7)
    p = outputs.sigmoid()
    dice = (2 * (p[0, ..., 0] + p[1].sum()) + 1) / (p.sum() + 3 + 1)
    gap = with_dice.criterion(outputs, targets) - plain.criterion(outputs, targets)
    assert float(gap) == pytest.approx(0.7 * (1 - float(dice)))
    halves = [with_dice.criterion(outputs[i : i + 1], targets[i : i + 1]) for i in range(2)]
    whole = with_dice.criterion(outputs, targets)
    assert float(sum(halves) / 2) != pytest.approx(float(whole))  # it is not a mean over examples
    assert float(soft_dice(torch.zeros(3), torch.zeros(3))) == 1


def test_pictures_of_wrong_sizes_are_refused(tmp_path):
    workload = _write(tmp_path, lambda number: np.zeros((40, 40 + number // 29)))
    with pytest.raises(ValueError, match=r"of one size, at least 32 a side, got \[\(40, 40\), \(40, 41\)\]"):
        next(workload.batches(0))
    with pytest.raises(ValueError, match="at least 64 a side"):
        next(replace(_write(tmp_path / "same", lambda _: np.zeros((40, 40))), crop=64).batches(0))
