"""Projects without a package of their own: their code is read from a checkout, ``--peer-path NAME=DIR``."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Checkout:
    """A repository that has to be fetched by hand."""

    repository: str
    file: str
    """A file that is in it, to know it by."""


CHECKOUTS = {
    "kfac_pytorch": Checkout("https://github.com/gpauloski/kfac-pytorch", "kfac/preconditioner.py"),
    "distributed_shampoo": Checkout(
        "https://github.com/facebookresearch/optimizers", "distributed_shampoo/distributed_shampoo.py"
    ),
    "ist_mfac": Checkout("https://github.com/IST-DASLab/M-FAC", "optim.py"),
}
"""By the name of the peer."""


@dataclass
class PeerPaths:
    """Where checkouts are."""

    folders: dict[str, Path] = field(default_factory=dict)

    def set_paths(self, pairs: Iterable[str]) -> None:
        for pair in pairs:
            name, equals, folder = pair.partition("=")
            if not equals or name not in CHECKOUTS:
                raise ValueError(f"--peer-path must be NAME=DIR with NAME one of {', '.join(CHECKOUTS)}, got {pair!r}")
            path, checkout = Path(folder).expanduser().resolve(), CHECKOUTS[name]
            if not (path / checkout.file).is_file():
                raise ValueError(
                    f"--peer-path {name}: {folder} lacks {checkout.file}, so it is no checkout of {checkout.repository}"
                )
            self.folders[name] = path

    def folder(self, name: str) -> Path:
        if name not in self.folders:
            raise ValueError(f"{name} needs a checkout of {CHECKOUTS[name].repository}: --peer-path {name}=DIR")
        return self.folders[name]

    def versions(self) -> dict[str, str]:
        return {name: _version(folder, CHECKOUTS[name].file) for name, folder in self.folders.items()}


PATHS = PeerPaths()
"""Those of this process."""

set_paths = PATHS.set_paths


def _version(folder: Path, file: str) -> str:
    project = folder / "pyproject.toml"
    found = re.search(r'^version = "(.+)"', project.read_text(encoding="utf-8"), re.M) if project.is_file() else None
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()[:12]
    return f"{found[1]}, sha256 {digest}" if found else f"sha256 {digest}"


def package(name: str, module: str) -> Any:
    with _in_front(PATHS.folder(name)):
        return importlib.import_module(module)


def source_file(name: str) -> ModuleType:
    """Import the one file of a checkout that is of use, under a name that hides nothing."""
    return _source_file(f"benchmarks_peer_{name}", PATHS.folder(name) / CHECKOUTS[name].file)


@functools.cache
def _source_file(name: str, path: Path) -> ModuleType:
    plan = importlib.util.spec_from_file_location(name, path)
    assert plan is not None
    assert plan.loader is not None
    module = importlib.util.module_from_spec(plan)
    # Files for one experiment set things for all.
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    # What tests torch itself forbids such settings to the whole process.
    with torch.backends.__allow_nonbracketed_mutation():
        try:
            plan.loader.exec_module(module)
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    return module


@contextmanager
def _in_front(folder: Path) -> Iterator[None]:
    """Look into a checkout first, and say that what it asks about itself is installed."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            return "0"

    sys.path.insert(0, str(folder))
    try:
        with mock.patch.object(importlib.metadata, "version", version):
            yield
    finally:
        sys.path.remove(str(folder))
