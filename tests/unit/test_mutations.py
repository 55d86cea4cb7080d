"""The table of mutations fits the current package and tests, so that a run of it does not end in errors."""

import pytest

from tests.support import mutations
from tests.support.mutants import MUTATIONS, Mutation


def test_every_mutation_changes_a_different_line_and_names_existing_tests() -> None:
    assert len({m.name for m in MUTATIONS}) == len({(m.file, m.old) for m in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = (mutations.ROOT / "secondorder" / mutation.file).read_text()
        changed = mutations.mutated(text, mutation)
        compile(changed, mutation.file, "exec")
        assert sum(a != b for a, b in zip(text.split("\n"), changed.split("\n"), strict=True)) == 1, mutation.name
        assert mutation.tests, mutation.name
        for arguments in mutation.tests:
            paths = mutations.paths_of(arguments)
            assert paths, mutation.name
            assert all((mutations.ROOT / path).exists() for path in paths), mutation.name


@pytest.mark.parametrize(("old", "new"), [("missing", "x"), ("a", "b"), ("b = 2", "b = 2"), ("b = 2", "b = 2\n")])
def test_fragments_that_do_not_occur_once_or_change_nothing_are_errors(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="fault"):
        mutations.mutated("a = 1\na += 1\nb = 2", Mutation("fault", "file.py", old, new, ("tests",)))
