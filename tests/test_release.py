"""The parts of a release agree: version, changelog, citation, pins, supported versions, pipelines and types."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import secondorder
from tests.typed import user_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with mypy and pytest on 3.10

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def releases() -> list[tuple[str, str]]:
    """Return the versions of the changelog with their dates, the newest first."""
    return re.findall(r"^## \[(\d[^\]]*)\] - (\d{4}-\d{2}-\d{2})$", text_of("CHANGELOG.md"), re.M)


def oldest_torch() -> str:
    (torch_,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    (bound,) = torch_.specifier
    assert bound.operator == ">="  # and no upper bound
    return bound.version


def pythons() -> list[str]:
    return [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


# ------------------------------------------------------------------ versions
def test_changelog_has_the_version_under_an_empty_or_filled_unreleased() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", text_of("CHANGELOG.md"), re.M)
    assert headings[0] == "Unreleased"
    assert headings[1:] == [version for version, _ in releases()]
    released = [Version(version) for version, _ in releases()]
    assert released == sorted(released, reverse=True)
    # Between releases, the version of the package may be newer.
    assert Version(secondorder.__version__) >= released[0]


def test_citation_is_of_the_newest_release() -> None:
    assert (CITATION["version"], str(CITATION["date-released"])) == releases()[0]
    assert (CITATION["title"], CITATION["license"]) == (PROJECT["name"], PROJECT["license"])
    assert {"cff-version", "message", "authors", "abstract"} <= set(CITATION)


def test_the_version_is_a_literal_that_the_build_can_read() -> None:
    assert re.findall(r'^__version__ = "(.+)"$', text_of("secondorder/__init__.py"), re.M) == [secondorder.__version__]


def test_supported_versions_are_the_same_everywhere() -> None:
    page = re.search(r"<!-- versions: supported -->\n(.*?)\n<!--", text_of("docs/versions.md"), re.S)
    assert page is not None
    first, last = pythons()[0], pythons()[-1]
    assert page[1] == f"Python {first} to {last}, torch {oldest_torch()} or newer, without an upper bound."
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert Version(torch.__version__) >= Version(oldest_torch())


# ------------------------------------------------------------------ pins
def listed(name: str) -> list[Requirement]:
    return [Requirement(line) for line in text_of(name).splitlines() if line and not line.startswith("#")]


PINS, TRAINERS = listed("constraints.txt"), listed("constraints-integrations.txt")
EXTRAS = PROJECT["optional-dependencies"].values()
REQUIREMENTS = [Requirement(text) for texts in [PROJECT["dependencies"], *EXTRAS] for text in texts]


def names_of(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(r.name) for r in requirements}


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pins = {
        canonicalize_name(pin.name): pin for pin in [*PINS, *TRAINERS] if pin.marker is None or pin.marker.evaluate()
    }
    for requirement in REQUIREMENTS:
        if requirement.name == PROJECT["name"]:  # an extra that includes another
            continue
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"there is no pin for {requirement}"
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{pin} does not satisfy {requirement}"
    assert [str(pin) for pin in PINS if pin.name == "torch"] == ["torch==2.13.0"]  # without a local label
    # Both break imports of other packages.
    assert not {"torchvision", "timm"} & names_of([*PINS, *TRAINERS, *REQUIREMENTS])


def test_pins_of_trainers_extend_the_others() -> None:
    assert {"transformers", "accelerate", "lightning", "tensorboard", "wandb"} <= names_of(TRAINERS)
    assert not names_of(TRAINERS) & names_of(PINS)
    assert all([exact.operator for exact in pin.specifier] == ["=="] for pin in TRAINERS)


# ------------------------------------------------------------------ pipelines
def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def test_pipelines_have_read_access_and_only_two_jobs_have_more() -> None:
    expected = {"docs": {"deploy": {"pages", "id-token"}}, "release": {"publish": {"id-token"}}}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
        extra = {name: set(job["permissions"]) for name, job in jobs(path).items() if job.get("permissions")}
        assert extra == expected.get(path.stem, {})
        for name in extra:
            assert jobs(path)[name]["environment"]
            assert not any("run" in step for step in jobs(path)[name]["steps"])  # which would run code of our own


def test_every_job_ends_and_every_action_is_pinned_to_a_commit() -> None:
    for path in WORKFLOWS:
        assert all(job["timeout-minutes"] <= 60 for job in jobs(path).values())
        for step in (step for step in steps(path) if "uses" in step):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            if step["uses"].startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
        for line in re.findall(r"uses: .*", path.read_text(encoding="utf-8")):
            assert re.search(r"  # v\d+\.\d+\.\d+$", line), f"no version after {line}"


def test_pipelines_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.M))
    called = {
        path.stem: {
            word
            for step in steps(path)
            for line in re.findall(r"^make (.*)$", step.get("run", ""), re.M)
            for word in line.split()
            if re.fullmatch(r"[a-z][a-z-]*", word)
        }
        for path in WORKFLOWS
    }
    tests = {"check", "install", "test", "test-integrations"}
    assert called == {"docs": {"docs"}, "release": {"dist"}, "tests": tests}
    assert set().union(*called.values()) <= targets


def test_tests_run_on_every_python_and_on_the_oldest_pinned_and_newest_torch() -> None:
    matrix = jobs(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in matrix if row["torch"] == "pinned"] == pythons()
    versions = {row["torch"]: row.get("version", "") for row in matrix}
    assert versions["newest"] == "torch"
    assert versions["pinned"] == ""
    # The bound names a minor release, of which the first patch release is tested.
    assert Version(versions["oldest"].removeprefix("torch==")).release[:2] == Version(oldest_torch()).release[:2]
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")["install"]["strategy"]["matrix"]["python"]
    assert release == pythons()


# ------------------------------------------------------------------ types
def test_the_types_of_the_script_of_a_user_are_checked_with_those_of_the_package() -> None:
    configured = tomllib.loads(text_of("pyproject.toml"))["tool"]["mypy"]
    assert {"secondorder", "tests/typed"} <= set(configured["files"])


def test_the_script_of_a_user_runs(tmp_path: Path) -> None:
    user_script.main(tmp_path)
    model = user_script.network()
    user_script.closures(model, secondorder.EKFAC(model))
    user_script.observed(user_script.network())
    for optimizer in user_script.methods():
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.slow
def test_the_script_of_a_user_passes_mypy() -> None:
    """`make type`, and so `make check`, includes this check. Without a cache it takes 15 seconds."""
    script = "tests/typed/user_script.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert not done.stderr
    # `make type` reports errors in the package.
    assert [line for line in done.stdout.splitlines() if line.startswith(script)] == []
