"""The readers of the standard formats accept valid files, and refuse others by name."""

import gzip
import io
import os
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from benchmarks.workloads.readers import read_cifar_batch, read_gray_image, read_idx


def test_idx_bytes_written_by_hand(tmp_path):
    """Magic number 0x00000801 and big-endian counts, as in the description of the format."""
    (tmp_path / "labels.gz").write_bytes(gzip.compress(bytes.fromhex("0000080100000003070809")))
    assert read_idx(tmp_path / "labels.gz").tolist() == [7, 8, 9]


def test_idx_refuses_invalid_files(tmp_path):
    path, zipped = tmp_path / "images.gz", gzip.compress(np.random.default_rng(0).bytes(1000))
    for raw, message in [
        (gzip.compress(bytes.fromhex("00000d010000000100000000")), "magic number 00000d01"),  # floats
        (gzip.compress(b"PK\x03\x04 a zip file"), "magic number"),
        (gzip.compress(b""), "magic number"),
        (gzip.compress(bytes.fromhex("0000080300000001")), "truncated"),  # the header is truncated
        (gzip.compress(struct.pack(">4B2I", 0, 0, 8, 2, 3, 2) + b"12345"), "truncated or damaged"),  # too little data
        (gzip.compress(struct.pack(">4B2I", 0, 0, 8, 2, 3, 2) + b"1234567"), "truncated or damaged"),  # too much data
        (zipped[:100], "truncated or not gzip"),
        (b"not gzip", "truncated or not gzip"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            read_idx(path)


def _cifar(count=3):
    data = np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)
    return data, list(range(count))


def _python2_pickle(data, labels):
    """A batch in the format of Python 2: ``str`` keys and buffers, and arrays with the module name of old NumPy."""

    class Python2(pickle._Pickler):
        dispatch = dict(pickle._Pickler.dispatch)

        def save_bytes(self, obj):
            self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)
            self.memoize(obj)

        dispatch[bytes] = save_bytes

    buffer = io.BytesIO()
    Python2(buffer, 2).dump({b"data": data, b"labels": labels})
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize(
    "write", [_python2_pickle, lambda d, lab: pickle.dumps({"data": d, "labels": lab}, protocol=2)]
)
def test_cifar_batches_of_python_2_and_3(tmp_path, write):
    data, labels = _cifar()
    path = tmp_path / "data_batch_1"
    path.write_bytes(write(data, labels))
    images, read = read_cifar_batch(path)
    np.testing.assert_array_equal(images, data.reshape(-1, 3, 32, 32))
    assert read.tolist() == labels


class _Attack:
    def __reduce__(self):
        return os.system, ("true",)


def test_cifar_refuses_invalid_files(tmp_path):
    for content, message in [
        ({"data": _cifar()[0], "labels": _Attack()}, "refused to load .*system"),
        ({"data": _cifar()[0]}, "labels"),
        ({"data": _cifar()[0][:, :100], "labels": [0, 1, 2]}, "not a CIFAR-10 batch"),
        ({"data": _cifar()[0], "labels": [0, 1]}, "3 images but 2 labels"),
        ([1, 2], "expected a dictionary, got list"),
    ]:
        path = tmp_path / "data_batch_1"
        path.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(ValueError, match=message):
            read_cifar_batch(path)


def test_gray_image_refuses_colors(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(path)
    with pytest.raises(ValueError, match="8 bits of gray a pixel, got mode RGB"):
        read_gray_image(path)


def _damaged(raw, rng):
    """Change some bytes, most of them in the header, or truncate the file."""
    if rng.random() < 0.3:
        return raw[: rng.integers(len(raw))]
    found = bytearray(raw)
    for _ in range(rng.integers(1, 6)):
        found[rng.integers(min(len(raw), rng.choice([60, 200, 10_000])))] = rng.integers(256)
    return bytes(found)


@pytest.mark.filterwarnings("ignore")  # Pillow and NumPy warn about damaged files
@pytest.mark.parametrize("kind", ["tif", "jpeg", "png", "pickle"])
def test_every_damaged_file_is_a_value_error_with_its_name(kind, tmp_path):
    """The readers convert every error of the libraries that they use."""
    rng, path = np.random.default_rng(0), tmp_path / f"file.{kind}"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"data": _cifar()[0], "labels": [0, 1, 2]}, protocol=2))
    else:
        Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)).save(path)
    whole, refused = path.read_bytes(), 0
    for _ in range(60):
        path.write_bytes(_damaged(whole, rng))
        try:
            (read_cifar_batch if kind == "pickle" else read_gray_image)(path)
        except ValueError as err:
            refused += path.name in str(err)
    assert refused > 15
