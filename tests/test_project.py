"""What the project's own files promise each other: the pins cover every extra, and leave out what must not be there."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import secondorder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with mypy and pytest on 3.10

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def listed(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


PINS = listed("constraints.txt")
TRAINERS = listed("constraints-integrations.txt")


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for texts in [PROJECT["dependencies"], *extras] for text in texts]


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pins = {canonicalize_name(pin.name): pin for pin in PINS if pin.marker is None or pin.marker.evaluate()}
    for requirement in requirements():
        if requirement.name == PROJECT["name"]:  # an extra that includes another
            continue
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt has no pin for {requirement}"
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{pin} does not satisfy {requirement}"


def test_torch_is_pinned_without_a_local_label() -> None:
    assert [str(pin) for pin in PINS if pin.name == "torch"] == ["torch==2.13.0"]


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_packages_that_break_other_imports_stay_out(name: str) -> None:
    assert name not in {canonicalize_name(r.name) for r in [*PINS, *TRAINERS, *requirements()]}


def test_trainers_add_to_the_pins_and_repeat_none() -> None:
    names = {canonicalize_name(pin.name) for pin in TRAINERS}
    assert {"transformers", "accelerate", "lightning", "tensorboard", "wandb"} <= names
    assert not names & {canonicalize_name(pin.name) for pin in PINS}
    assert all([exact.operator for exact in pin.specifier] == ["=="] for pin in TRAINERS)


def test_the_version_is_a_literal_that_the_build_can_read() -> None:
    text = (ROOT / "secondorder" / "__init__.py").read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', text, re.M) == [secondorder.__version__]
