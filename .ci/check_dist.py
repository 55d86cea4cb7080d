"""Check a source distribution and a wheel as a user will meet them: what `make dist` runs after the build.

1. Contents: the wheel holds the package, its types and its licence and nothing else; the source distribution holds what
   it takes to test, document and build the package.
2. Metadata: valid by the rules of the package index, and as complete as pyproject.toml.
3. Tests: the wheel alone is installed in a new virtual environment, and the tests of the source distribution run
   there, in a folder outside the repository from which the package has been removed; before them mypy looks at a script
   of a user. The other packages, torch first, are those of the environment that runs this program; they become visible
   after the installation.

Usage: python .ci/check_dist.py dist [--public] [further arguments of pytest]
"""

import argparse
import email.parser
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
#: The fast half of the suite: every promise of torch.optim for every method, and factors, bases and directions against
#: independent mathematics. No process groups, no benchmarks, no site.
FAST_HALF = [
    "tests/contract",
    "tests/checkpoint",
    "tests/oracle",
    "tests/schedule",
    "tests/static",
    "tests/test_factory.py",
]
USER_SCRIPT = "tests/typed/user_script.py"
IN_WHEEL = ["secondorder/py.typed", "secondorder/__init__.py", "secondorder/methods/kfac.py"]
IN_SDIST = [
    "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md", "Makefile",
    "pyproject.toml", "constraints.txt", "mkdocs.yml", "docs/index.md", "docs/hooks.py", "docs/images/demo.png",
    "docs/assets/katex/katex.min.js",
    "docs/multinode/train.py", "benchmarks/__main__.py", "tests/conftest.py", "tests/support/methods.py",
    "tests/typed/user_script.py", ".ci/check_dist.py", ".github/workflows/tests.yml", "secondorder/py.typed",
]  # fmt: skip
CONFTEST = '''"""The package under test is the installed wheel."""

from pathlib import Path

import secondorder

PLACE = Path(secondorder.__file__).resolve()
assert PLACE.is_relative_to({prefix!r}), f"{{PLACE}} is not in the environment of the wheel"


def pytest_report_header() -> str:
    return f"secondorder {{secondorder.__version__}} from {{PLACE.parent}}"
'''


def sole(folder: Path, pattern: str) -> Path:
    """The one file of this name; a second one would be left over from another build."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} holds {len(found)} files {pattern}, not one: {[path.name for path in found]}")
    return found[0]


def check_wheel(wheel: Path) -> Metadata:
    """Contents of the wheel.

    Returns:
        Its metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(record)
    info = record.rsplit("/", 1)[0] + "/"
    foreign = [name for name in names if not name.startswith(("secondorder/", info))]
    compiled = [name for name in names if name.endswith((".pyc", ".so"))]
    missing = [name for name in [*IN_WHEEL, f"{info}licenses/LICENSE"] if name not in names]
    sources = {f"secondorder/{path.relative_to(ROOT / 'secondorder').as_posix()}" for path in package_files()}
    unshipped = sorted(sources - set(names))
    refuse(foreign=foreign, compiled=compiled, missing=missing, unshipped=unshipped)
    return Metadata.from_email(text, validate=True)  # the rules by which the package index refuses an upload


def package_files() -> list[Path]:
    """Modules of the package in the repository."""
    return [path for path in (ROOT / "secondorder").rglob("*.py") if "__pycache__" not in path.parts]


def check_sdist(sdist: Path) -> None:
    """Contents of the source distribution."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    outputs = (".venv", ".git/", "site/", "dist/", "demo-output/", "bench-output/")
    unwanted = [name for name in names if "__pycache__" in name or name.startswith(outputs)]
    refuse(missing=[name for name in IN_SDIST if name not in names], unwanted=unwanted)


def check_metadata(metadata: Metadata, public: bool) -> None:
    """What the page of the package index will show; ``public``: also where the project lives."""
    minors = {c.rsplit("::", 1)[1].strip() for c in metadata.classifiers or [] if c.startswith("Programming Language")}
    described = metadata.description or ""
    lacks = {
        "a summary": not metadata.summary,
        "the licence": metadata.license_expression != "MIT",
        "a description in Markdown": not described or metadata.description_content_type != "text/markdown",
        "Python 3.10 to 3.13": not {"3.10", "3.11", "3.12", "3.13"} <= minors,
        "torch": not any(requirement.name == "torch" for requirement in metadata.requires_dist or []),
        "the address of the repository in [project.urls]": public and not metadata.project_urls,
    }
    refuse(**{"without " + what: [str(metadata.name)] for what, absent in lacks.items() if absent})


def refuse(**findings: list[str]) -> None:
    """End the program if any of the lists is not empty."""
    for what, names in findings.items():
        if names:
            raise SystemExit(f"{what}: {', '.join(sorted(names)[:20])}")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel, and everything else that it needs behind it.

    Returns:
        Its Python.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # Before the other packages are visible: pip must not meet the editable installation among them.
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*map(str, command), str(wheel)], check=True)
    paths = {name: sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site,) = folder.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder and does not read the .pth files in it: the editable installation sleeps.
    (site / "other-packages.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(paths.values())))
    return python


def outside_tree(sdist: Path, folder: Path, python: Path) -> Path:
    """The source distribution without its package, in a folder outside the repository.

    Returns:
        The folder.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data") if extracts_safely() else archive.extractall(folder)
    (tree,) = [path for path in folder.iterdir() if path.is_dir()]
    shutil.rmtree(tree / "secondorder")
    (tree / "conftest.py").write_text(CONFTEST.format(prefix=str(python.parent.parent.resolve())), encoding="utf-8")
    return tree


def run(python: Path, tree: Path, *words: str) -> None:
    """Run a module of Python in that folder; a failure ends the program with its status."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    status = subprocess.run([str(python), "-m", *words], cwd=tree, env={**env, "OMP_NUM_THREADS": "1"}).returncode
    if status:
        raise SystemExit(status)


def extracts_safely() -> bool:
    """Whether this Python's ``tarfile`` knows filters (3.10.12 and 3.11.4 do)."""
    return hasattr(tarfile, "data_filter")


def versions(metadata: Metadata, sdist: Path) -> None:
    """Both archives are of one version."""
    with tarfile.open(sdist) as archive:
        (record,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        member = archive.extractfile(record)
        assert member is not None
        version = email.parser.BytesParser().parsebytes(member.read())["Version"]
    if version != str(metadata.version):
        raise SystemExit(f"the wheel is {metadata.version}, the source distribution {version}")


def main() -> None:
    """Check the folder that is named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="with one wheel and one source distribution")
    parser.add_argument("--public", action="store_true", help="refuse metadata without the address of the repository")
    options, arguments = parser.parse_known_args()
    folder = options.folder.resolve()
    wheel, sdist = sole(folder, "*.whl"), sole(folder, "*.tar.gz")
    metadata = check_wheel(wheel)
    check_sdist(sdist)
    versions(metadata, sdist)
    check_metadata(metadata, public=options.public)
    print(f"{wheel.name}, {sdist.name}: contents and metadata as they should be")
    with tempfile.TemporaryDirectory(prefix="wheel-") as place:
        outside = Path(place)
        python = install(wheel, outside / "environment")
        (outside / "source").mkdir()
        tree = outside_tree(sdist, outside / "source", python)
        # torch has no annotations of its own for backward(), which every script calls.
        run(python, tree, "mypy", "--strict", "--untyped-calls-exclude=torch", "--config-file=", USER_SCRIPT)
        run(python, tree, "pytest", "-q", "-p", "no:cacheprovider", *FAST_HALF, *arguments)
    print(f"{wheel.name}: passes its tests outside the repository")


if __name__ == "__main__":
    main()
