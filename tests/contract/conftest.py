"""Parametrization over the methods, their variants, the rules that they know and the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.methods import METHODS, Method, Variant
from tests.support.tasks import CNN, MLP, TASKS, TRANSFORMER, Task


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "option(*keywords): a contract test of methods that have these keywords")
    config.addinivalue_line("markers", "fixed_layout: not for variants whose state has the sizes of the first batch")
    config.addinivalue_line(
        "markers", "rules(mapping): run for every `rule` of the mapping whose keywords the method has"
    )


def keywords_of(rule: Any) -> Mapping[str, Any]:
    """The keywords of a rule, which may stand first in a tuple with what they are compared with."""
    return rule[0] if isinstance(rule, tuple) else rule


def pair_up(method: Method, variant: Variant, task: Task) -> bool:
    """Whether a test of every variant and task is run for these two.

    A window does not know layers, only shapes: each of its variants is run on those of one task, the first one on all.
    A layer method does: one task is enough for some of its variants, the one with the most kinds of layers.
    """
    if method.layerwise:
        return not variant.narrow or task is TRANSFORMER
    return variant is method.variants[0] or task is CNN


def variants(methods: list[Method], needed: set[str], lazy: bool) -> list[tuple[Method, Variant]]:
    """Every variant that leaves room for the keywords that a test needs."""
    every = [(method, variant) for method in methods for variant in method.variants if lazy or not variant.lazy]
    return [(method, variant) for method, variant in every if not needed & variant.excludes]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    needed = {keyword for mark in metafunc.definition.iter_markers("option") for keyword in mark.args}
    methods: list[Method] = [method for method in METHODS if method.accepts(*needed)]
    lazy = metafunc.definition.get_closest_marker("fixed_layout") is None
    rules = metafunc.definition.get_closest_marker("rules")
    if rules is not None:
        known = [(m, name) for m in methods for name, rule in rules.args[0].items() if m.knows(keywords_of(rule))]
        metafunc.parametrize(("method", "rule"), known, ids=[f"{method.name}-{name}" for method, name in known])
    elif {"variant", "task"} <= set(metafunc.fixturenames):
        triples = [(m, v, task) for m, v in variants(methods, needed, lazy) for task in TASKS if pair_up(m, v, task)]
        metafunc.parametrize(
            ("method", "variant", "task"), triples, ids=[f"{m.name}-{v.name}-{task.name}" for m, v, task in triples]
        )
        return
    elif "variant" in metafunc.fixturenames:
        pairs = variants(methods, needed, lazy)
        metafunc.parametrize(("method", "variant"), pairs, ids=[f"{m.name}-{v.name}" for m, v in pairs])
    elif "method" in metafunc.fixturenames:
        metafunc.parametrize("method", methods, ids=[method.name for method in methods])
    if "task" in metafunc.fixturenames:
        metafunc.parametrize("task", TASKS, ids=[task.name for task in TASKS])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every model here has a parameter without a block on purpose: its warning is noise."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*follow the fallback rule"))


@pytest.fixture
def mlp() -> Task:
    return MLP
