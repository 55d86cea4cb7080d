"""Record what training runs show, and compare two such records.

    python -m tests.golden record DIR [--only PATTERN] [--jobs N] [--package PATH]
    python -m tests.golden compare A B [--accept FILE]

`--package` takes the package from another checkout, so that the same recorder can look at an older one. A record is one
JSON file per run: tensors as dtype, shape and the first bits of their SHA-256, numbers with all their digits. Delete
this folder when the rebuild is over.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CHILD = "GOLDEN_PACKAGE"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run everything, and write one file per run")
    record.add_argument("directory", type=Path)
    record.add_argument("--only", default="*", help="runs to record, such as 'ranks/*' or '*/kfac-*'")
    record.add_argument("--jobs", type=int, default=2, help="processes that record, of one thread each")
    record.add_argument("--package", type=Path, default=ROOT, help="checkout whose package is recorded")
    compare = commands.add_parser("compare", help="print what differs; the status is 1 if anything does")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--accept", type=Path, help="file of differences that are wanted: a run and a field per line")
    compare.add_argument("--only", default="*", help="runs to compare")
    given = parser.parse_args()
    if given.command == "compare":
        from tests.golden.compare import differences

        return differences(given.a, given.b, given.accept, given.only)
    if _CHILD not in os.environ:
        return _with_package(given.package.resolve())
    from tests.golden.record import record_all

    return record_all(given.directory, given.only, given.jobs, os.environ[_CHILD])


def _with_package(checkout: Path) -> int:
    """This command once more, with that package first in the path of it and of all processes that it starts."""
    with tempfile.TemporaryDirectory(prefix="golden") as folder:
        Path(folder, "secondorder").symlink_to(checkout / "secondorder")
        settings = {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", _CHILD: str(checkout),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.golden", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
