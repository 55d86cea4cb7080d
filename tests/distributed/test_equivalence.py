"""N ranks on shards of a batch are equivalent to one process on the joined batch, under every strategy.

Statistics are compared at a learning rate of 0, so that gradients do not matter: the mean over shards of unequal size
is not the gradient of the joined batch, but statistics have to be those of the joined batch.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.grid import each, only
from tests.support.oracles import ranks
from tests.support.oracles.kfac import expected_factors, kron
from tests.support.oracles.ranks import EXAMPLES, LENGTH, TASKS, Run, assert_held, assert_same_path, build, flat, shard
from tests.support.pool import Pool, device_of
from tests.support.saving import paths_of, snapshot, started, train, trained

KRONECKER = ("kfac_eigen", "kfac_cholesky", "ekfac_running", "ekfac_intra")
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}
BOTH = ["comm", "mem"]

# ---------------------------------------------------------------------------------------------------------------- Paths
OVERLAP = {"overlap": True, "factor_update_steps": 1, "inv_update_steps": 2}
RARE = {"inv_update_steps": 2, "scale_update_steps": 4}
WHITENING = {"lr": 0.01, "power": 0.5, "momentum_mode": "pre", "kl_clip": None}
KINDS = {
    "words": ("kfac_eigen", "ekfac_intra", "ekfac_running", "hylo_sngd", "mfac_sparse"),
    "cnn": ("kfac_cholesky", "ekfac_intra", "hylo_sngd"),
    "attention": ("kfac_eigen", "ekfac_intra"),
}
RUNS = [
    *(Run("mlp", method, steps=12) for method in (*KRONECKER, "hylo_sngd", "mfac", "mfac_sparse", "ggt")),
    Run(keywords=OVERLAP, steps=8),
    # Rounding determines the basis of a null space, and differs between shards and the joined batch.
    Run("broad", "ekfac_intra", steps=10),
    Run("broad", "ekfac_running", steps=10),
    Run("broad", "ekfac_running", WHITENING, steps=10),
    # scales that are measured in bases of other ranks, from more examples than layers have columns
    Run("mixed", "ekfac_intra", RARE, steps=10),
    Run("mixed", "ekfac_intra", {**RARE, "transport": "recompute"}, steps=10),
    # leading eigenvectors, which every rank computes or receives
    *(Run("mlp", method, {"inverse_rank": 2}, steps=12) for method in ("kfac_eigen", "kfac_cholesky")),
    Run("words", "ekfac_intra", {"token_is_example": True}, steps=10),
    Run("mlp", "ekfac_intra", {"max_factor_dim": 5, "basis_update": "qr"}, steps=10),
    Run("attention", "ekfac_intra", {"transport": "recompute", "scale_update_steps": 2, "token_is_example": True}),
    Run("mlp", "kfac_cholesky", {"factor_storage": "packed"}, steps=10),
    # every type of layer
    *(Run(task, method, steps=6) for task, methods in KINDS.items() for method in methods),
    # without synchronization
    *(Run("mlp", method, steps=10, micro=2) for method in (*KRONECKER, "hylo_sngd", "mfac")),
    # orthogonalization without curvature
    Run("cnn", "ekfac_running", {**WHITENING, "orthogonalize": True, "inv_update_steps": 0}, steps=10),
]
LAYOUTS = [("comm", 2), ("hybrid_half", 4), ("mem", 3), ("hybrid_third", 3), ("comm", 4), ("mem", 4), ("mem", 2)]
#: Strategies that place factors, for K-FAC and EK-FAC only.
OVERRIDES = [("comm_owner", 3), ("mem_replicated", 3), ("chief_inverses", 3), ("chief", 3)]


def runs_of(strategy: str, world: int, rest: bool) -> list[Run]:
    """The runs that are tested under a strategy by default, or the rest, which is slow."""
    layouts, runs = (LAYOUTS, RUNS) if (strategy, world) in LAYOUTS else (OVERRIDES, RUNS[: len(KRONECKER)])
    found = []
    for i, run in enumerate(runs):
        fit = [layout for layout in layouts if EXAMPLES // layout[1] % run.micro == 0]
        if (strategy, world) in fit and (fit[i % len(fit)] != (strategy, world)) == rest:
            found.append(run)
    return found


def averaged(rank: int, world: int, strategy: str, run: Run) -> Tensor:
    """A trajectory without DDP, with a strategy that averages the gradients itself."""
    model, optimizer = started(rank, strategy, run)
    with optimizer:
        return torch.stack(train(model, optimizer, rank, world, run, 0, run.steps))


def paths_of_runs(rank: int, world: int, strategy: str, runs: list[Run]) -> list[Tensor]:
    """Trajectories, alternately under DDP and without it."""
    return [(averaged if i % 2 else ranks.together)(rank, world, strategy, run) for i, run in enumerate(runs)]


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a_share", "all_others"])
@pytest.mark.parametrize(("strategy", "world"), LAYOUTS + OVERRIDES)
def test_shards_equal_the_joined_batch(pool: Pool, strategy: str, world: int, rest: bool) -> None:
    runs = runs_of(strategy, world, rest)
    for run, *paths in zip(runs, *pool.run(paths_of_runs, strategy, runs, world=world, timeout=120), strict=True):
        assert_same_path(paths, ranks.alone(run)[0])


def observed(rank: int, world: int, strategy: str | None, run: Run) -> Tensor:
    """A trajectory with the exact Fisher of all outputs, or of one, because HyLo keeps a single row of each example."""
    model = TASKS[run.task].model()
    comm = ranks.STRATEGIES[strategy](average_gradients=True) if strategy else None
    with build(run.method, model, comm, fisher="exact", **run.keywords) as optimizer:
        path = []
        for step in range(run.steps):
            inputs, targets = shard(run.batch(step), rank, world)
            optimizer.zero_grad()
            outputs = model(inputs)
            if run.method == "hylo_sngd":
                optimizer.observe(outputs[:, :1], "gaussian")
                outputs[:, 0].square().mean().backward()
            else:
                optimizer.observe(outputs, "categorical")
                F.cross_entropy(outputs, targets).backward()
            optimizer.step()
            path.append(flat(model))
        return torch.stack(path)


OBSERVED = {
    "project": Run("mlp", "ekfac_intra", steps=6),
    "recompute": Run("mlp", "ekfac_intra", {"transport": "recompute"}, steps=6),
    "rows": Run("mlp", "hylo_sngd", {"approx": "expand"}, steps=6),
}


@each(run=OBSERVED, strategy=BOTH)
def test_an_exact_fisher_is_that_of_the_joined_batch(pool: Pool, run: Run, strategy: str) -> None:
    assert_same_path(pool.run(observed, strategy, run), observed(0, 1, None, run), tolerance=1e-10)


def switched(model: nn.Module, optimizer: Any, run: Run, rank: int = 0, world: int = 1) -> Tensor:
    """A trajectory with curvature that is turned on and off, the first time without a step that uses it."""
    group, path = optimizer.param_groups[0], train(model, optimizer, rank, world, run, 0, 1)
    group["inv_update_steps"] = 1
    snapshot(optimizer)  # after this, only the owner of a layer has its factors
    group["inv_update_steps"] = 0
    for trains in (False, True):  # the ranks compare their plans again
        model.get_parameter(next(name for name, _ in model.named_parameters())).requires_grad_(trains)
        path += train(model, optimizer, rank, world, run, len(path), len(path) + 1)
    for interval in (0, 1, 0, 2):
        group["inv_update_steps"] = interval
        path += train(model, optimizer, rank, world, run, len(path), len(path) + 2)
    optimizer.close()
    return torch.stack(path)


def switched_on_a_rank(rank: int, world: int, strategy: str, run: Run) -> Tensor:
    return switched(*started(rank, strategy, run), run, rank, world)


@pytest.mark.parametrize(("strategy", "world"), [("comm", 2), ("mem", 3)])
def test_curvature_is_turned_on_and_off_on_all_ranks(pool: Pool, strategy: str, world: int) -> None:
    run = Run("mlp", "kfac_eigen", {"inv_update_steps": 0, "factor_update_steps": 1, "orthogonalize": True})
    model = TASKS["mlp"].model()
    expected = switched(model, build(run.method, model, **run.keywords), run)
    assert_same_path(pool.run(switched_on_a_rank, strategy, run, world=world, timeout=60), expected)


def alternating(model: nn.Module, optimizer: Any, step: int) -> None:
    """Use another decay in every step."""
    optimizer.param_groups[0]["factor_decay"] = 0.5 if step % 2 else 0.9


def freezing(model: nn.Module, optimizer: Any, step: int) -> None:
    """Freeze a bias from step 3 until step 7, and a layer from step 5 until step 8."""
    model.conv.bias.requires_grad_(not 3 <= step < 7)
    model.wide.requires_grad_(not 5 <= step < 8)


def exchanging(model: nn.Module, optimizer: Any, step: int) -> None:
    """Use the other estimator from step 3 until step 7."""
    if step in (3, 7):
        now = optimizer.param_groups[0]["estimator"]
        optimizer.param_groups[0]["estimator"] = "running" if now == "intra" else "intra"


DECAYING = Run(keywords={"factor_update_steps": 1, "inv_update_steps": 4, "refresh_warmup": False}, steps=9)
RUNNING = {**RARE, "estimator": "running"}
#: Functions that are called before a step, and runs.
CHANGES = {
    "decay": (alternating, DECAYING),
    "layers": (freezing, Run("mixed", "ekfac_intra", RARE, steps=13)),
    "to running": (exchanging, Run("mixed", "ekfac_intra", RARE, steps=13)),
    "to intra": (exchanging, Run("mixed", "ekfac_intra", RUNNING, steps=13)),
}


def changing(rank: int, world: int, strategy: str | None, change: str) -> tuple[Tensor, list[int]]:
    """The trajectory, and the number of entries of the bases after every step."""
    before, run = CHANGES[change]
    model = TASKS[run.task].model()
    comm = ranks.STRATEGIES[strategy](average_gradients=True) if strategy else None
    with build(run.method, model, comm, **run.keywords) as optimizer:
        path, kept = [], []
        for step in range(run.steps):
            before(model, optimizer, step)
            path += train(model, optimizer, rank, world, run, step, step + 1)
            states = [optimizer.state[block.owner] for block in optimizer.blocks.values()]
            kept.append(sum(v.numel() for state in states for k, v in state.items() if k.startswith("basis_")))
        return torch.stack(path), kept


@pytest.mark.parametrize(("change", "strategy"), [("decay", "comm"), *((change, "mem") for change in CHANGES)])
def test_options_and_layers_may_change(pool: Pool, change: str, strategy: str) -> None:
    """A decay applies to the step that measures, and ranks only have all bases while the scales are measured anew."""
    found, (expected, whole) = pool.run(changing, strategy, change), changing(0, 1, None, change)
    assert_same_path([path for path, _ in found], expected, tolerance=1e-11 if change == "decay" else 1e-10)
    if change in ("to running", "to intra"):
        for step, bases in enumerate(whole):
            kept = sum(numbers[step] for _, numbers in found)
            assert kept == (2 * bases if (3 <= step < 7) == (change == "to intra") else bases), step


# ----------------------------------------------------------------------------------------------------------- Statistics
SIZES = {"2": [(6, 6), (5, 2), (1, 7)], "3": [(4, 4, 4), (5, 2, 1), (1, 8, 3)]}
SUMMED = {**STILL, "loss_reduction": "sum"}
MEASURED = {
    "eigen": Run("mlp", "kfac_eigen", STILL),
    "cholesky": Run("mlp", "kfac_cholesky", STILL),
    "mixed": Run("mixed", "ekfac_intra", STILL),
    "words": Run("words", "ekfac_intra", STILL),
    **{f"sum {method}": Run("mlp", method, SUMMED, loss=ranks.sum_loss) for method in KRONECKER},
    "sum rows": Run("mlp", "hylo_sngd", {"lr": 0.0, "update_steps": 1, "loss_reduction": "sum"}, loss=ranks.sum_loss),
}


@each(run=MEASURED, sizes=SIZES, strategy=BOTH)
def test_unequal_batches_are_weighted_by_their_examples(
    pool: Pool, run: Run, sizes: list[tuple[int, ...]], strategy: str
) -> None:
    """This holds for mean losses; for summed losses, statistics are those of the joined batch, too."""
    held = pool.run(ranks.statistics_of_shards, strategy, run, sizes, world=len(sizes[0]))
    assert_held(held, ranks.joined_statistics(run, [sum(of_step) for of_step in sizes]), strategy == "comm")


def masked_steps(model: nn.Module, optimizer: Any, rank: int, world: int) -> Tensor:
    """Five steps on sequences of unequal length, and the parameters after each."""
    path = []
    device = next(model.parameters()).device
    for step in range(5):
        batch = TASKS["words"].batch(step)
        lengths = torch.randint(1, LENGTH + 1, (EXAMPLES,), generator=torch.Generator().manual_seed(step))
        keep = torch.arange(LENGTH) < lengths[:, None]
        inputs, targets = (t.to(device) for t in shard(batch, rank, world))
        kept = shard((keep, keep), rank, world)[0].to(device)
        optimizer.zero_grad()
        with optimizer.mask(kept):
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        (losses.view(targets.shape) * kept).sum(1).mean().backward()
        optimizer.step()
        path.append(flat(model))
    return torch.stack(path)


def masked_shards(rank: int, world: int, strategy: str, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with ranks.optimizer_on(model, strategy, run) as optimizer:
        return masked_steps(model, optimizer, rank, world), ranks.curvatures(optimizer)


@each(method=["kfac_eigen", "ekfac_intra"], strategy=BOTH)
def test_ranks_may_have_unequal_numbers_of_unmasked_tokens(pool: Pool, method: str, strategy: str) -> None:
    run = Run("words", method, {"factor_update_steps": 1, "inv_update_steps": 2})
    model = TASKS["words"].model()
    optimizer = build(method, model, **run.keywords)
    path = masked_steps(model, optimizer, 0, 1)
    results = pool.run(masked_shards, strategy, run, world=3)
    assert_same_path([of_rank[0] for of_rank in results], path)
    assert_held([of_rank[1] for of_rank in results], ranks.curvatures(optimizer), strategy == "comm")


# ------------------------------------------------------------------------------------- Against a plain list of examples
def test_factors_are_those_of_a_plain_list_of_examples(pool: Pool) -> None:
    run = Run("mlp", "kfac_eigen", STILL)
    for strategy in ("comm", "mem", "hybrid_third", "chief", "chief_inverses", "chief_own"):
        own = 5 if strategy == "chief_own" else EXAMPLES  # only the shard of the chief
        expected = expected_factors(TASKS["mlp"].model(), *(t[:own] for t in run.batch(0)), F.cross_entropy)
        held = pool.run(ranks.statistics_of_shards, strategy, run, [(5, 4, 3)], world=3)
        assert_held(held, {name: kron(B, A) for name, (A, B) in expected.items()}, strategy == "comm")
        if strategy.startswith("chief"):
            assert [len(of_rank) for of_rank in held] == [3, 0, 0]


# --------------------------------------------------------------------- Layers that only use the examples of their owner
def simulated(run: Run, owners: dict[str, int], world: int) -> Tensor:
    """One process with a copy of the model per rank, which captures from its shard and steps with the joined gradient.

    For each layer, all copies adopt the step of the copy of its owner.
    """
    models = [TASKS[run.task].model() for _ in range(world)]
    optimizers = [build(run.method, model, **run.keywords) for model in models]
    path = []
    for step in range(run.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = shard(run.batch(step), rank, world)
            optimizer.zero_grad()
            run.loss(model(inputs), targets).backward()
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in replicas]).mean(0)
            for p in replicas:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, rank in owners.items():
                source = models[rank].get_submodule(name).state_dict()
                for model in models:
                    model.get_submodule(name).load_state_dict(source)
        path.append(flat(models[0]))
    return torch.stack(path)


UNCLIPPED = {"kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 2}
OWN_DATA = {
    **{method: Run("mlp", method, UNCLIPPED, steps=6) for method in ("kfac_eigen", "kfac_cholesky", "ekfac_intra")},
    "hylo_sngd": Run("mlp", "hylo_sngd", steps=5),
    "hylo_kid": Run("mlp", "hylo_kid", {"rank_fraction": 1.0}, steps=5),
}


@each(run=OWN_DATA, where=[("local_factors", 3), ("local_factors", 2), ("chief_own", 2)])
def test_owners_estimate_from_their_own_examples(pool: Pool, run: Run, where: tuple[str, int]) -> None:
    strategy, world = where
    found = pool.run(trained, strategy, run, world=world, **({"root": 1} if strategy == "chief_own" else {}))
    owners = found[0]["owners"]
    assert all(of_rank["owners"] == owners and "statistics" not in of_rank["sent"] for of_rank in found)
    assert set(owners.values()) == ({1} if strategy == "chief_own" else set(range(world)))
    assert_same_path(paths_of(found), simulated(run, owners, world), tolerance=1e-10)


#: Every method under every strategy that supports it: some strategies place factors.
OF_FACTORS = ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses", "chief_own")
UNDER = {f"{m}-{s}": (m, s) for s in ranks.STRATEGIES for m in ranks.METHODS if m in KRONECKER or s not in OF_FACTORS}


def world_of(strategy: str) -> int:
    return {"hybrid_half": 4, "hybrid_third": 3}.get(strategy, 2)


@only("ekfac_intra-mem", of=UNDER)
def test_replicas_are_equal_for_200_steps(pool: Pool, of: tuple[str, str]) -> None:
    method, strategy = of
    paths = pool.run(ranks.together, strategy, Run("mlp", method, {"lr": 0.01}, steps=200), world=world_of(strategy))
    ranks.assert_replicas(paths)
    assert not torch.equal(paths[0][0], paths[0][-1])
