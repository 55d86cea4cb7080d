"""Slices of gliomas: patients are on one side of the split only, and slices keep their tumours; what lacks is named."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.workloads import DataMissingError, make_workload
from benchmarks.workloads.lgg import augmented, read_patient
from benchmarks.workloads.tiny import write_brains


def _first(workload, count=2, seed=0):
    return list(islice(workload.batches(seed), count))


def _same(one, other):
    return all(a.equal(b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def _brains(folder, patients=10, side=32):
    write_brains(folder / "lgg", np.random.default_rng(1), patients, side)
    return make_workload("lgg", folder, "smoke")


def test_patients_are_either_trained_on_or_held_out(tmp_path):
    workload = _brains(tmp_path)
    train, held_out = workload._folders
    assert [folder.name[8:12] for folder in held_out] == ["0004", "0009"]
    assert not set(train) & set(held_out)
    assert workload.examples == 8 * 3
    _first(workload, 30)
    assert set(workload._read) == set(train)


def test_slices_follow_the_seed_and_keep_their_tumours(tmp_path):
    workload = _brains(tmp_path)
    for name in ("none", "flips", "affine"):
        varied = replace(workload, augment=name)
        batches = _first(varied, 4)
        assert _same(batches, _first(varied, 4))
        assert not _same(batches, _first(varied, 4, seed=1))
        for images, masks in batches:
            assert images.shape == (4, 3, 32, 32)
            assert masks.shape == (4, 1, 32, 32)
            assert set(masks.unique().tolist()) == {0.0, 1.0}
            bright = (images.mean(1, keepdim=True) > images.amax((1, 2, 3), keepdim=True) / 2).float()
            assert (bright == masks).float().mean() > 0.97


def test_slices_with_tumour_are_drawn_more_often(tmp_path):
    folder = _brains(tmp_path)._folders[0][0]
    for number in (2, 3):
        Image.new("L", (32, 32)).save(folder / f"{folder.name}_{number}_mask.tif")
    workload = replace(_brains(tmp_path / "other"), augment="none")
    patient = read_patient(folder, 32)
    generator = torch.Generator().manual_seed(0)
    tumours = sum(bool(workload._draw(patient, generator)[1].any()) for _ in range(300))
    assert tumours / 300 == pytest.approx((1 + 0.1 / 3) / 1.1, abs=0.04)


def test_slices_are_scaled_and_normalised_by_patient(tmp_path):
    folder = _brains(tmp_path, side=64)._folders[0][0]
    patient = read_patient(folder, 32)
    assert patient.images.shape == (3, 3, 32, 32)
    assert patient.masks.shape == (3, 1, 32, 32)
    torch.testing.assert_close(patient.normalised().mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(patient.normalised().std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_turning_is_a_rotation():
    """A spot keeps its distance from the middle, up to the change of scale."""
    images, masks = torch.zeros(40, 3, 65, 65), torch.zeros(40, 1, 65, 65)
    masks[:, :, 30:35, 50:55] = 1
    _, turned = augmented(images, masks, "affine", torch.Generator().manual_seed(0))
    places = torch.stack([mask[0].nonzero().double().mean(0) for mask in turned]) - 32
    assert ((places.norm(dim=1) - 20).abs() < 2).all()
    angles = torch.atan2(places[:, 0], places[:, 1].abs()).rad2deg()
    assert -16 < angles.min() < -8
    assert 8 < angles.max() < 16


def test_dice_is_the_mean_over_patients(tmp_path):
    workload = _brains(tmp_path, patients=30)
    everything = nn.Conv2d(3, 1, 1)
    nn.init.zeros_(everything.weight)
    nn.init.ones_(everything.bias)
    shares = [read_patient(folder, 32).masks.double().mean() for folder in workload._folders[1]]
    dice = [float(2 * share / (1 + share)) for share in shares]
    assert len(dice) == 6
    assert workload.evaluate(everything, everything=True) == pytest.approx(np.mean(dice), rel=1e-2)
    assert workload.evaluate(everything) == pytest.approx((dice[0] + dice[5]) / 2, rel=1e-2)


def test_incomplete_and_damaged_slices_are_refused(tmp_path):
    folder = _brains(tmp_path)._folders[0][0]
    mask, picture = (folder / f"{folder.name}_2{end}.tif" for end in ("_mask", ""))
    with pytest.raises(ValueError, match="must hold at least 5 patients, got 4"):
        _first(_brains(tmp_path / "few", patients=4))
    whole = picture.read_bytes()
    for raw in (whole[:1000], b"no picture"):
        picture.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{picture.name} is truncated or no picture"):
            read_patient(folder, 32)
    Image.new("L", (32, 32)).save(picture)
    with pytest.raises(ValueError, match="must have three colours of 8 bits a pixel, got mode L"):
        read_patient(folder, 32)
    picture.write_bytes(whole)
    Image.new("L", (32, 31)).save(mask)
    with pytest.raises(ValueError, match=f"{mask.name} and {picture.name} must be of the size of the first slice"):
        read_patient(folder, 32)
    mask.unlink()
    with pytest.raises(DataMissingError, match=f"lacks {mask.name}"):
        read_patient(folder, 32)
