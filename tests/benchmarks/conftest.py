import json
import shlex

import pytest

from benchmarks import checkpoints, machine
from benchmarks.cli import main
from benchmarks.commands import step_time, window
from benchmarks.runner import Trainer
from benchmarks.workloads.tiny import write_tiny_data


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder with tiny files in the standard formats."""
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that runs a command line, checks its status, and returns the JSON files that it wrote.

    A command line with an ``error`` has status 2 and prints these words in one line.
    """

    def run(line, *words, status=0, error=None):
        assert main([*shlex.split(line), *map(str, words), "--out-dir", str(tmp_path)]) == (2 if error else status)
        if error:
            (printed,) = capsys.readouterr().err.splitlines()
            assert error in printed
        return {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}

    return run


@pytest.fixture
def study(data_dir, tmp_path):
    """Return a function that runs a study at tiny size, and returns what it stored."""

    def study(kind, status=0, **options):
        command = kind(**{"data_dir": data_dir, "out_dir": tmp_path, "size": "smoke", **options})
        assert command.run() == status
        return json.loads((command.out_dir / f"{command.stem}.json").read_text())

    return study


@pytest.fixture
def killed_after(monkeypatch):
    """Return a function that makes runs end after a number of steps, and returns a list of the steps taken."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    step, taken = Trainer.step, []

    def limit(steps):
        def counted(trainer):
            if trainer.history.label != "reference":
                if len(trainer.history.losses) == steps:
                    raise KeyboardInterrupt
                taken.append(len(trainer.history.losses))
            return step(trainer)

        monkeypatch.setattr(Trainer, "step", counted)
        return taken

    return limit


@pytest.fixture
def known_machine(monkeypatch):
    """Fixed rates, because a measurement takes a second each time."""
    for module in (machine, step_time, window):
        for name, rate in (("gemm_gflops", machine.Rate(1.0, 2.0)), ("copy_gbytes", machine.Rate(3.0, 4.0))):
            monkeypatch.setattr(module, name, lambda *_, rate=rate, **__: rate, raising=False)
    monkeypatch.setattr(window, "COPY_BYTES", 2**16)
