"""What a release is made of agrees: version, changelog, citation, supported Pythons and torch, pipelines, types."""

from __future__ import annotations

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
by_name = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def releases() -> list[tuple[str, str]]:
    """Versions of the changelog with their dates, the newest first."""
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
    # Between releases the package may be ahead of them, never behind.
    assert Version(secondorder.__version__) >= released[0]


def test_citation_is_of_the_newest_release() -> None:
    assert (CITATION["version"], str(CITATION["date-released"])) == releases()[0]
    assert (CITATION["title"], CITATION["license"]) == (PROJECT["name"], PROJECT["license"])
    assert {"cff-version", "message", "authors", "abstract"} <= set(CITATION)


def test_supported_versions_are_told_alike_everywhere() -> None:
    page = re.search(r"<!-- versions: supported -->\n(.*?)\n<!--", text_of("docs/versions.md"), re.S)
    assert page is not None
    first, last = pythons()[0], pythons()[-1]
    assert page[1] == f"Python {first} to {last}, torch {oldest_torch()} or newer, without an upper bound."
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert Version(torch.__version__) >= Version(oldest_torch())


# ------------------------------------------------------------------ pipelines
def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def test_there_are_pipelines_for_tests_docs_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@by_name
def test_a_pipeline_may_read_and_a_job_says_what_more_it_needs(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    may_write = {name: set(job.get("permissions", {})) for name, job in jobs(path).items()}
    extra = {name: rights for name, rights in may_write.items() if rights}
    expected = {"docs": {"deploy": {"pages", "id-token"}}, "release": {"publish": {"id-token"}}}
    assert extra == expected.get(path.stem, {})
    for name in extra:
        assert jobs(path)[name]["environment"]
        assert not any("run" in step for step in jobs(path)[name]["steps"])  # nothing of ours runs with such rights


@by_name
def test_every_job_ends_and_every_action_is_pinned_to_a_commit(path: Path) -> None:
    assert all(job["timeout-minutes"] <= 60 for job in jobs(path).values())
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            if step["uses"].startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
    for line in re.findall(r"uses: .*", path.read_text(encoding="utf-8")):
        assert re.search(r"  # v\d+\.\d+\.\d+$", line), f"no version beside {line}"


@by_name
def test_a_pipeline_calls_targets_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.M))
    called = {
        word
        for step in steps(path)
        for line in re.findall(r"^make (.*)$", step.get("run", ""), re.M)
        for word in line.split()
        if re.fullmatch(r"[a-z][a-z-]*", word)
    }
    assert called <= targets
    expected = {"docs": {"docs"}, "release": {"dist"}, "tests": {"check", "install", "test", "test-integrations"}}
    assert called == expected[path.stem]


def test_tests_run_on_every_python_and_on_the_oldest_pinned_and_newest_torch() -> None:
    matrix = jobs(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in matrix if row["torch"] == "pinned"] == pythons()
    versions = {row["torch"]: row.get("version", "") for row in matrix}
    assert versions["newest"] == "torch"
    assert versions["pinned"] == ""
    # The bound names a minor release; its first patch is what is tested.
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
def test_the_script_of_a_user_has_the_types_that_it_says() -> None:
    """Also a part of `make type`, and so of `make check`: without its cache this takes a quarter of a minute."""
    script = "tests/typed/user_script.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert not done.stderr
    # Findings in the package are those of `make type`.
    assert [line for line in done.stdout.splitlines() if line.startswith(script)] == []
