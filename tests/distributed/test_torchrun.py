"""Programs under ``torchrun``: the templates of the documentation on two agents, and the benchmarks."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.cli import main as benchmarks
from benchmarks.ranks import Ranks
from tests.support.launching import ROOT, free_port, launch, torchrun

TEMPLATES = ROOT / "docs" / "multinode"
SECONDS = 150  # time limit on a busy machine for a program that usually takes ten seconds
AGENTS, RANKS_PER_AGENT = 2, 2

# Replacements of Slurm's commands for a job of two nodes, on one machine.
SCONTROL = "#!/bin/bash\nfor _ in $(seq 2); do echo localhost; done\n"
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
status=0
wait -n || { status=$?; kill $first $second 2>/dev/null; }
wait -n || { status=$?; kill $first $second 2>/dev/null; }
exit $status
"""
TORCHRUN = '#!/bin/bash\nexec "$PYTHON" -m torch.distributed.run "$@"\n'

# Replaces the template's train.py: it runs that script, and writes the results of this rank.
PROBE = """
import importlib.util, json, os, pathlib, sys
import torch, torch.distributed as dist

spec = importlib.util.spec_from_file_location("template", os.environ["TEMPLATE"])
template = importlib.util.module_from_spec(spec)
spec.loader.exec_module(template)
dist.init_process_group("gloo")
first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first_attempt and dist.get_rank() == int(os.environ.get("KILLED_RANK", -1)):
    saved = template.save
    def save_and_die(*args):
        saved(*args)
        if args[2] == 20:
            template.cross_entropy = lambda *args: os._exit(9)
    template.save = save_and_die
opt = template.train(template.arguments(), torch.device("cpu"))
comm, rank = opt.comm, dist.get_rank()
found = {
    "rank": rank,
    "agent": int(os.environ["GROUP_RANK"]),
    "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "row": dist.get_process_group_ranks(comm._row),
    "column": dist.get_process_group_ranks(comm._column),
    "sizes": sorted({(r.stage, r.size) for r in comm.collectives.counter.records}),
    "factors": opt.memory_usage()["factors"],
    "parameters": torch.cat([p.detach().flatten() for p in opt.param_groups[0]["params"]]).tolist(),
}
pathlib.Path(os.environ["FOUND"], f"rank{rank}.json").write_text(json.dumps(found))
opt.close()
dist.destroy_process_group()
"""


def _run_job(folder: Path, *words: str, **env: str) -> list[dict]:
    """Submit the template of a job, with a probe in place of its script; return the results of all ranks."""
    commands, templates = folder / "bin", folder / "templates"
    for made in (commands, templates):
        made.mkdir(parents=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("torchrun", TORCHRUN)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    shutil.copy(TEMPLATES / "node.sh", templates)
    (templates / "train.py").write_text(PROBE, encoding="utf-8")
    job = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_NNODES": str(AGENTS),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_SUBMIT_DIR": str(templates),
        "RANKS_PER_NODE": str(RANKS_PER_AGENT),
        "PORT": str(free_port()),
        "TEMPLATE": str(TEMPLATES / "train.py"),
        "FOUND": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # the site has a copy of the folder of the templates
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",  # the template has to set this to 1
        **env,
    }
    done = launch(["bash", str(TEMPLATES / "job.sbatch"), *words], folder, SECONDS, job)
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(AGENTS * RANKS_PER_AGENT)]


@pytest.mark.slow
def test_two_agents_keep_directions_inside_an_agent(tmp_path):
    found = _run_job(tmp_path, "--epochs", "1", "--batch-size", "128")
    agents = {agent: [f["rank"] for f in found if f["agent"] == agent] for agent in range(AGENTS)}
    assert sorted(agents.values()) == [[0, 1], [2, 3]]
    for mine in found:
        assert mine["row"] == agents[mine["agent"]]
        assert [rank in agents[mine["agent"]] for rank in mine["column"]].count(True) == 1
        sizes = dict(mine["sizes"])
        assert (sizes["directions"], sizes["curvature"], sizes["statistics"]) == (2, 2, 4)
        assert mine["parameters"] == found[0]["parameters"]
    assert len({mine["factors"] for mine in found}) > 1  # owner-only
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1


@pytest.mark.slow
def test_a_rank_that_dies_changes_nothing(tmp_path):
    """Both agents restart their ranks, which continue from the checkpoint of step 20."""
    words = ("--epochs", "1", "--batch-size", "32", "--save-every", "20")
    whole = _run_job(tmp_path / "whole", *words)
    again = _run_job(tmp_path / "again", *words, KILLED_RANK="3", MAX_RESTARTS="3")
    assert max(mine["attempt"] for mine in whole) == 0
    assert max(mine["attempt"] for mine in again) > 0  # an agent that follows the other one does not count restarts
    assert [mine["parameters"] == again[0]["parameters"] for mine in again] == [True] * 4
    # DistributedDataParallel sums in another order in the first step after its construction.
    assert again[0]["parameters"] == pytest.approx(whole[0]["parameters"], abs=1e-5)


# ---------------------------------------------------------------------- benchmarks
def _train(folder: Path, ranks: int, *words: str) -> dict:
    """Run ``train`` of the benchmarks on a number of ranks; return its results."""
    command = ["train", "--workload", "digits", "--size", "smoke", *words, "--threads", "1", "--out-dir", str(folder)]
    if ranks == 1:
        assert benchmarks(command) == 0
    else:
        launcher = torchrun("--standalone", "--nproc-per-node", str(ranks), "-m", "benchmarks")
        folder.mkdir(exist_ok=True)
        done = launch([*launcher, *command], folder, SECONDS)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("loss at step") == 1  # only rank 0 prints
        assert "sent per step, " in done.stdout
        assert f"rank {ranks - 1}" in done.stdout
    (written,) = folder.glob("train-*.json")
    return json.loads(written.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "method", "comm"), [
    (2, "kfac", "mem_opt"), (2, "ekfac", "comm_opt"), (2, "hylo", "mem_opt"), (2, "sparse_mfac", "mem_opt"),
    (2, "inverse_dp", "local_factors"), (2, "kfac", "chief_only:deliver=inverses"), (2, "kfac", "hybrid_opt:0.5"),
    (4, "ggt", "hybrid_opt:0.5"),
])  # fmt: skip
def test_benchmarks_train_with_any_strategy(tmp_path, ranks, method, comm):
    words = ("--optim", method, "--comm", comm, "--steps", "12")
    found = _train(tmp_path / "all", ranks, *words)
    assert [rank["role"] for rank in found["ranks"]] == ["gradient"] * ranks
    if method in {"hylo", "inverse_dp"}:  # the choice of rows and the factors depend on the number of ranks
        assert all(loss is not None and loss < 3 for loss in found["losses"])
        return
    one = _train(tmp_path / "one", 1, *words)
    exact = (method, comm) == ("kfac", "mem_opt")
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-3 if exact else 1e-2)
    if exact:
        factors = [rank["memory"]["factors"] for rank in found["ranks"]]
        assert sum(factors) == one["memory"]["factors"] > max(factors)
        for rank in found["ranks"]:
            assert rank["sent"]["statistics"] > 0
            assert rank["sent"]["directions"] > 0
            assert "curvature" not in rank["sent"]


def test_every_rank_trains_on_a_part_of_the_batch():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = (torch.arange(12.0).view(6, 2), torch.arange(6))
    parts = [Ranks(rank, 3).share(whole, optimizer) for rank in range(3)]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])
    assert [len(targets) for _, targets in parts] == [2, 2, 2]
    assert Ranks().share(whole, optimizer)[0] is not None
    assert Ranks().wrap(model, optimizer) is model
    for size in (4, 5, 7):
        with pytest.raises(ValueError, match=f"a batch of 6 cannot .* {size} ranks: take --batch-size {size}"):
            Ranks(0, size).share(whole, optimizer)
