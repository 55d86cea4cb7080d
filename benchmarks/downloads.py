"""Addresses of data sets, and the checksums that were published for them.

Only ``python -m benchmarks fetch`` uses this module. It downloads with ``pooch``.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.workloads import WorkloadName
from benchmarks.workloads.base import optional_package

Unpack = Literal["tar", "zip", "gzip"]
"""How to unpack a file. ``gzip`` compresses it instead, and adds ``.gz`` to its name."""


@dataclass(frozen=True)
class File:
    url: str
    name: str  # name in the folder of the data set
    checksum: str | None = None
    """Published checksum, for example ``md5:…``. None if there is none; then the content is not checked."""
    unpack: Unpack | None = None


@dataclass(frozen=True)
class DataSet:
    folder: str  # name of the folder, inside the folder of all data
    licence: str
    files: tuple[File, ...]


_CIFAR_LICENCE = "not stated; cite A. Krizhevsky, Learning Multiple Layers of Features, 2009"


def _files(address: str, lines: str, ending: str = "", unpack: Unpack | None = None) -> tuple[File, ...]:
    """Return files of one address. Each line has a name without its ending, and the checksum if there is one."""
    rows = [(*line.split(), None) for line in lines.strip().splitlines()]
    return tuple(File(f"https://{address}/{row[0]}{ending}", f"{row[0]}{ending}", row[1], unpack) for row in rows)


MNIST = DataSet(
    "mnist",
    "Creative Commons Attribution-Share Alike 3.0, Yann LeCun and Corinna Cortes",
    _files(
        "ossci-datasets.s3.amazonaws.com/mnist",
        """
        train-images-idx3-ubyte md5:f68b3c2dcbeaaa9fbdd348bbdeb94873
        train-labels-idx1-ubyte md5:d53e105ee54ea40749a09fcbcd1e9432
        t10k-images-idx3-ubyte  md5:9fb629c4189551a2d022fa330f9573f3
        t10k-labels-idx1-ubyte  md5:ec29112dd5afa0611ce80d1b7f02629c
    """,
        ".gz",
    ),
)
CIFAR10, CIFAR100 = (
    DataSet(name, _CIFAR_LICENCE, _files("www.cs.toronto.edu/~kriz", line, "-python.tar.gz", "tar"))
    for name, line in (
        ("cifar10", "cifar-10 md5:c58f30108f718f92721af3b95e74349a"),
        ("cifar100", "cifar-100 md5:eb9058c3a382ffc7106e4002c42a8d85"),
    )
)
_TEXT = "input.txt sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE = DataSet(
    "shakespeare",
    "public domain",
    _files("raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare", _TEXT),
)
_GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
PIECES = DataSet(
    "gpt2",
    "modified MIT license of github.com/openai/gpt-2",
    tuple(
        File(f"{_GPT2}/{there}", here, f"sha256:{checksum}")
        for there, here, checksum in (
            ("encoder.json", "vocab.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
            ("vocab.bpe", "merges.txt", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        )
    ),
)
_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/tok"
MULTI30K = DataSet(
    "multi30k",
    "see https://github.com/multi30k/dataset; for research only",
    tuple(
        File(f"{_MULTI30K}/{part}.lc.norm.tok.{end}", f"{part}.{end}", None, "gzip" if part == "train" else None)
        for part in ("train", "val", "test_2016_flickr")
        for end in ("de", "en")
    ),
)
SQUAD = DataSet(
    "squad",
    "Creative Commons Attribution-Share Alike 4.0",
    _files(
        "rajpurkar.github.io/SQuAD-explorer/dataset",
        """
        train-v2.0 md5:62108c273c268d70893182d5cf8df740
        dev-v2.0   md5:246adae8b7002f8679c027697b0b7cf8
        train-v1.1 md5:981b29407e0affa3b1b156f72073b945
        dev-v1.1   md5:3e85deb501d4e538b6bc56f786231552
    """,
        ".json",
    ),
)
_TASKS = ("CoLA", "MNLI", "QNLIv2", "QQP-clean", "RTE", "SST-2 md5:9f81648d4199384278b86e315dac217c", "STS-B", "WNLI")
GLUE = DataSet(
    "glue",
    "those of its parts, see https://gluebenchmark.com/tasks; request MRPC from Microsoft",
    _files("dl.fbaipublicfiles.com/glue/data", "\n".join(_TASKS), ".zip", "zip"),
)
_MEMBRANE = "https://raw.githubusercontent.com/zhixuhao/unet/master/data/membrane/train"
MEMBRANE = DataSet(
    "membrane",
    "that of the ISBI 2012 challenge on the segmentation of neuronal structures",
    tuple(
        File(f"{_MEMBRANE}/{part}/{number}.png", f"{part}/{number}.png")
        for part in ("image", "label")
        for number in range(30)
    ),
)

DATA_SETS: dict[WorkloadName, tuple[DataSet, ...]] = {
    "autoencoder": (MNIST,), "logistic": (MNIST,), "resnet20": (CIFAR10,), "resnet32": (CIFAR10,),
    "resnet110": (CIFAR10,), "vgg16": (CIFAR10, CIFAR100), "chargpt": (SHAKESPEARE,),
    "gpt2_small": (SHAKESPEARE, PIECES), "multi30k": (MULTI30K,), "bert_qa": (SQUAD,), "glue": (GLUE,),
    "unet": (MEMBRANE,),
}  # fmt: skip
_IMAGENET = (
    "ImageNet asks for an account: https://www.image-net.org/download.php (ILSVRC 2012, classification). The images of "
    "val are in a single folder there: sort them by class"
)
BY_HAND: dict[WorkloadName, str] = {"resnet18": _IMAGENET, "resnet50": _IMAGENET}
"""Workloads whose data cannot be downloaded automatically, and why."""


def fetch(data_set: DataSet, data_dir: Path, only: str = "") -> list[Path]:
    """Download and unpack files. A file that exists and has the right checksum is not downloaded again."""
    downloader, folder = optional_package("pooch", "download"), data_dir / data_set.folder
    unpackers = {"tar": downloader.Untar, "zip": downloader.Unzip}
    found = []
    for file in data_set.files:
        target = folder / file.name
        packed = folder / f"{file.name}.gz"
        if only.lower() not in file.name.lower() or (file.unpack == "gzip" and packed.is_file()):
            continue
        unpack = unpackers[file.unpack](extract_dir=".") if file.unpack in unpackers else None
        downloader.retrieve(
            file.url, known_hash=file.checksum, fname=target.name, path=target.parent, processor=unpack
        )  # fmt: skip
        if file.unpack == "gzip":
            packed.write_bytes(gzip.compress(target.read_bytes()))
            target.unlink()
        found.append(packed if file.unpack == "gzip" else target)
    return found
