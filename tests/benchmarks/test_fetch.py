"""The command ``fetch``, with a stand-in for the package that downloads files, so that no test uses the network."""

import gzip
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.commands.fetch import Fetch
from benchmarks.downloads import BY_HAND, DATA_SETS, SQUAD
from benchmarks.workloads import WORKLOADS


@pytest.fixture
def asked(monkeypatch):
    """Recorded downloads; the stand-in writes the address into the file."""
    calls = []

    def retrieve(url, known_hash, fname, path, processor):
        calls.append((url, known_hash, processor))
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / fname).write_text(url)

    def unpacker(kind):
        return lambda extract_dir: (kind, extract_dir)

    module = SimpleNamespace(retrieve=retrieve, Untar=unpacker("tar"), Unzip=unpacker("zip"))
    monkeypatch.setitem(sys.modules, "pooch", module)
    return calls


def test_files_have_checksums_and_are_unpacked_in_their_folder(tmp_path, asked, capsys):
    assert Fetch("autoencoder", tmp_path).run() == 0
    assert (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").is_file()
    assert len(asked) == 4
    assert all(checksum.startswith("md5:") and unpack is None for _, checksum, unpack in asked)
    assert "mnist: licence: Creative Commons" in capsys.readouterr().out
    Fetch("vgg16", tmp_path).run()
    assert [unpack for *_, unpack in asked[4:]] == [("tar", ".")] * 2
    assert (tmp_path / "cifar100" / "cifar-100-python.tar.gz").is_file()
    Fetch("glue", tmp_path, only="sst").run()
    url = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"
    assert asked[6:] == [(url, "md5:9f81648d4199384278b86e315dac217c", ("zip", "."))]


def test_text_is_compressed_if_the_workload_expects_it(tmp_path, asked):
    Fetch("multi30k", tmp_path).run()
    folder = tmp_path / "multi30k"
    assert gzip.decompress((folder / "train.de.gz").read_bytes()).endswith(b"train.lc.norm.tok.de")
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{part}.{end}" for part in ("val", "test_2016_flickr") for end in ("de", "en")} | {
        "train.de.gz",
        "train.en.gz",
    }
    Fetch("multi30k", tmp_path).run()
    assert len(asked) == 6 + 4  # the compressed files are not downloaded again


def test_a_workload_that_cannot_be_fetched_is_an_error(tmp_path, capsys, asked, monkeypatch):
    assert Fetch("digits", tmp_path).run() == 0
    assert capsys.readouterr().out == "digits needs no files\n"
    monkeypatch.setitem(sys.modules, "pooch", None)
    for words, message in [
        ({"workload": "resnet50"}, r"resnet50 cannot be fetched: ImageNet asks for an account: https://"),
        ({"workload": "bert_qa", "only": "v3"}, r"--only v3: no such file of bert_qa, only train-v2\.0\.json"),
        ({"workload": "chargpt"}, r'pooch is not installed: pip install "secondorder\[download\]"'),
    ]:
        with pytest.raises(ValueError, match=message):
            Fetch(data_dir=tmp_path, **words).run()
    assert not asked
    assert not list(tmp_path.iterdir())


def test_every_workload_has_an_entry():
    without_files = {"digits", "poisson"}
    assert set(WORKLOADS) <= set(DATA_SETS) | set(BY_HAND) | without_files
    assert len({file.name for file in SQUAD.files}) == 4
