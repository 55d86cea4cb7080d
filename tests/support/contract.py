"""Chooses the cases of a test that takes a `method`: a covering array, so that a default run stays short.

The parameters of the test determine its cases, and marks add to them:

==========================  ===========================================================================================
`method`                    every method that has the keywords of `@pytest.mark.option("keyword", ...)`
`method, variant`           every variant of these methods
`task`                      every task with every kind of method
`@pytest.mark.cover(x=)`    every value of `x` with every kind of method
`@pytest.mark.rules(RULES)` every `rule` of the mapping with every kind of method that knows its keywords
==========================  ===========================================================================================

Every two values of `rule` and of the parameters of `cover` also occur together. Methods of one kind share their code:
methods with factors, with rows of examples, with windows. If one place in the code keeps a promise for all methods,
`@pytest.mark.once` is enough: it runs every value with any one method. `@pytest.mark.full` adds all combinations that
the default run leaves out as slow tests.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.grid import cover, ids_of, parameters, values_at, values_of
from tests.support.methods import METHODS, Method, Variant
from tests.support.tasks import CNN, MLP, TASKS, TRANSFORMER, Task

MARKS = {
    "option(*keywords)": "a contract test of methods that have these keywords",
    "rules(mapping)": "run for every `rule` of the mapping, by methods that know its keywords",
    "cover(**values)": "run for every value, by every kind of method",
    "once": "every value by any method, and every method with any value",
    "full": "all combinations that the default run leaves out are slow tests",
}


#: Rules of the update. Every method runs those whose keywords it has.
RULES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True},
    "coupled-decay": {"weight_decay": 0.1},
    "decoupled-decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw-fallback": {"fallback": "adamw", "weight_decay": 0.1},
    "inner-adamw": {"inner": "adamw", "lr": 1e-3},
    "graft-sgd": {"graft": "sgd"},
    "graft-adam": {"graft": "adam", "lr": 1e-3},
    "clipped": {"clip_norm": 0.5, "clip_value": 0.1},
    "ema": {"momentum_mode": "ema", "weight_decay": 0.1},
    "legacy-decay": {"weight_decay": 0.01, "weight_decay_mode": "legacy"},
    "over-gradients": {"momentum_mode": "pre"},
    "betas": {"betas": (0.9, 0.99), "bias_correction": True},
    "in-the-span": {"betas": (0.5, 1.0), "sgd_weight": 0.0},
    "decay-reg": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
    "both-decays": {"weight_decay": 0.01, "weight_decay_mode": "both"},
    "relative-damping": {"damping": 0.1, "damping_mode": "relative"},
    "window-scale": {"scale": "window"},
    "eigh": {"solver": "eigh"},
}


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore a warning: all models of the tasks have a parameter without a block on purpose."""
    for item in items:
        if item.path.parent.name in {"contract", "checkpoint"}:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*follow the fallback rule"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" not in metafunc.fixturenames:
        if "task" in metafunc.fixturenames:
            metafunc.parametrize("task", TASKS, ids=[task.name for task in TASKS])
        return
    marks = {mark.name: mark for mark in reversed([*metafunc.definition.iter_markers()])}
    needed = {keyword for mark in metafunc.definition.iter_markers("option") for keyword in mark.args}
    rules = marks["rules"].args[0] if "rules" in marks else {}
    axes: dict[str, Any] = {"task": TASKS} if "task" in metafunc.fixturenames else {}
    axes |= {"rule": {name: name for name in rules}} if rules else {}
    for mark in metafunc.definition.iter_markers("cover"):
        axes |= mark.kwargs
    with_variants = "variant" in metafunc.fixturenames
    cases = list(_cases(needed, axes, rules, with_variants))
    kept = set(cover({case: _shown(case, [*axes], "once" in marks) for case in cases}))
    names = ("method", *(["variant"] if with_variants else []), *axes)
    metafunc.parametrize(
        names,
        [
            _param(case, list(axes.values()), with_variants, slow=case not in kept)
            for case in cases
            if case in kept or "full" in marks
        ],
    )


Case = tuple[int, int, tuple[int, ...]]  # indices of the method, of its variant and of the value on every other axis


def _cases(needed: set[str], axes: Mapping[str, Any], rules: Mapping[str, Any], variants: bool) -> Any:
    values = [values_of(given) for given in axes.values()]
    for m, method in enumerate(METHODS):
        if not method.accepts(*needed):
            continue
        for v, variant in enumerate(method.variants if variants else method.variants[:1]):
            if variants and needed & variant.excludes:
                continue
            for indices in product(*map(range, map(len, values))):
                found = dict(zip(axes, values_at(values, indices), strict=True))
                if rules and not method.knows(keywords_of(rules[found["rule"]])):
                    continue
                if variants and "task" in found and not pair_up(method, variant, found["task"]):
                    continue
                yield m, v, indices


def _shown(case: Case, axes: Sequence[str], once: bool) -> frozenset[Hashable]:
    """The combinations of values that a case covers."""
    m, v, indices = case
    family = "" if once else METHODS[m].family
    places = [*zip(axes, indices, strict=True)]
    together = combinations([(name, index) for name, index in places if name != "task"], 2)
    return frozenset({(m, v), *((family, place) for place in places), *together})


def _param(case: Case, axes: Sequence[Any], variants: bool, *, slow: bool) -> Any:
    method = METHODS[case[0]]
    own = [method, method.variants[case[1]]] if variants else [method]
    values = values_at(map(values_of, axes), case[2])
    return parameters([*own, *values], [*(one.name for one in own), *values_at(map(ids_of, axes), case[2])], slow=slow)


def keywords_of(rule: Any) -> Mapping[str, Any]:
    """The keywords of a rule, which may be a tuple of keywords and a reference to compare them with."""
    return rule[0] if isinstance(rule, tuple) else rule


def pair_up(method: Method, variant: Variant, task: Task) -> bool:
    """Whether a variant of a method is tested on a task.

    A window depends on shapes only: the first variant runs on all tasks, and the others on one. A layer method depends
    on the types of layers: its narrow variants run on the task with the most types of layers, and the others on all.
    """
    if method.layerwise:
        return not variant.narrow or task is TRANSFORMER
    return variant is method.variants[0] or task is CNN


@pytest.fixture
def mlp() -> Task:
    return MLP
