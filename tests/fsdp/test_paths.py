"""Every method takes the same steps with FSDP2 as in one process on the joined batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from secondorder import LowRank, TopK
from tests.support.grid import only
from tests.support.oracles.ranks import METHODS, Run, assert_replicas, distance, flat, shard, together
from tests.support.pool import Pool, device_of
from tests.support.sharding import Case, Wrap, alone, assert_like_one_process, sharded_path, started

EACH, HSDP = Wrap(), Wrap(replicas=2)

#: Every method with its default strategy.
PLAIN = {
    f"{method} {task}": Case(method, task, wrap=EACH)
    for method in METHODS
    for task in ("odd", "cnn")
    if method not in ("hylo_kid", "hylo_kis")  # the choice of rows depends on the shards
}

WRAPPED = {
    "root only": Case(wrap=Wrap(each=False)),
    "kept after the forward": Case(wrap=Wrap(reshard=False), method="ekfac_running"),
    "sharded after the forward": Case(wrap=Wrap(reshard=True), method="kfac_cholesky"),
    "columns": Case(wrap=Wrap(columns=True), task="even"),
    "columns and a window": Case("mfac", "even", wrap=Wrap(columns=True)),
    "columns and a sparse window": Case("mfac_sparse", "even", wrap=Wrap(columns=True)),
    "columns at the root": Case("ekfac_intra", "even", wrap=Wrap(columns=True, each=False)),
}

REPLICATED = {
    "layers": Case(wrap=HSDP),
    "eigenvalues": Case("ekfac_running", wrap=HSDP),
    "window": Case("mfac", wrap=HSDP),
    "sparse window": Case("mfac_sparse", wrap=Wrap(each=False, replicas=2)),
    "square root": Case("ggt", wrap=HSDP),
    "columns": Case("kfac_cholesky", "even", wrap=Wrap(columns=True, replicas=2)),
    "hybrid": Case(wrap=HSDP, strategy="hybrid_half"),
    "copies": Case("ekfac_running", wrap=HSDP, strategy="comm"),
    "copies of a window": Case("mfac", wrap=HSDP, strategy="comm"),
}

STRATEGIC = {
    f"{method} {strategy}": Case(method, strategy=strategy)
    for method in ("kfac_eigen", "ekfac_intra", "mfac", "mfac_sparse", "ggt")
    for strategy in ("mem", "hybrid_half", "comm", "mem_replicated", "comm_owner", "chief", "chief_inverses")
    if method[:2] in ("kf", "ek") or strategy in ("hybrid_half", "comm")
}

#: Options of the steps before and after the preconditioner, many of them in one case.
OPTIONS = {
    "bounds": Case(keywords={
        "fallback": "adamw", "fallback_lr": 0.01, "clip_norm": 0.05, "kl_clip": None, "max_factor_dim": 5,
        "damping_split": "pi", "skip_layers": ["conv", "squeeze"],
    }),
    "graft adam": Case(keywords={
        "graft": "adam", "lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True,
    }),
    "inner adamw": Case(keywords={"inner": "adamw", "weight_decay": 0.1, "lr": 0.01}),
    "accumulated and reduced": Case("ekfac_running", micro=3, sync=True, wrap=EACH),
    "momentum before": Case("ekfac_running", keywords={"momentum_mode": "pre", "power": 0.5, "lr": 0.01}),
    "examples in new bases": Case("ekfac_intra", keywords={"transport": "recompute", "scale_update_steps": 2}),
    "decay of the objective": Case("hylo_sngd", keywords={"weight_decay": 0.1, "weight_decay_mode": "reg"}),
    "window, bounds": Case("ggt", keywords={
        "skip_biases": True, "skip_norm_layers": True, "fallback": "adamw", "clip_norm": 0.1,
    }),
    "window, old decay": Case("ggt", keywords={
        "momentum": 0.0, "betas": (0.9, 0.99), "bias_correction": True,
        "weight_decay": 0.1, "weight_decay_mode": "both",
    }),
    "window, decoupled": Case("mfac", keywords={
        "momentum_mode": "ema", "solver": "eigh", "weight_decay": 0.1, "decoupled_weight_decay": True,
    }),
    "window, decay": Case("mfac", split=True, keywords={
        "partition": "group", "weight_decay": 0.1, "weight_decay_mode": "reg",
    }),
    "window, graft sgd": Case("mfac_sparse", strategy="hybrid_half", keywords={"graft": "sgd", "partition": "layer"}),
    "window, inner adamw": Case("mfac", keywords={
        "inner": "adamw", "weight_decay": 0.1, "lr": 0.01, "window_dtype": torch.bfloat16,
    }),
    "window of two groups": Case("mfac_sparse", split=True, keywords={
        "weight_decay": 0.1, "compression": TopK(density=0.3, block_size=8, error_bits=8),
    }),
    "low rank": Case("mfac", keywords={"compression": LowRank(1)}),
    "low rank, layer": Case("mfac", keywords={"compression": LowRank(1), "partition": "layer", "momentum_mode": "pre"}),
    "together": Case("ekfac_running", micro=3, wrap=EACH, frozen="mix", thaw=4, split=True, keywords={
        "nesterov": True, "weight_decay": 0.1, "graft": "sgd", "kl_clip": 1e-3, "stagger": True,
    }),
    "window, together": Case("mfac", micro=3, wrap=EACH, frozen="mix", thaw=4, split=True, keywords={
        "momentum_mode": "pre", "weight_decay": 0.1, "graft": "adam", "lr": 0.01, "clip_norm": 0.1,
    }),
}  # fmt: skip


#: Cases for every method, option, strategy and way to shard parameters.
ALIKE = {
    f"{what}_{name}".replace(" ", "_").replace(",", ""): case
    for what, cases in (("method", PLAIN), ("option", OPTIONS), ("strategy", STRATEGIC), ("cut", WRAPPED))
    for name, case in cases.items()
}


@only(
    "method_kfac_eigen_odd-4", "method_ekfac_intra_cnn-2", "method_hylo_sngd_odd-2",
    "option_together-2", "option_window_together-4", "option_inner_adamw-2", "option_bounds-2", "option_window_decay-2",
    "option_low_rank_layer-2",
    "strategy_ekfac_intra_hybrid_half-4", "strategy_mfac_sparse_comm-2", "strategy_kfac_eigen_comm_owner-2",
    "cut_kept_after_the_forward-2", "cut_columns-4", "cut_columns_and_a_sparse_window-2",
    case=ALIKE, world=[2, 4],
)  # fmt: skip
def test_ranks_train_like_one_process(pool: Pool, case: Case, world: int) -> None:
    assert_like_one_process(pool, case, world)


@only("layers", "sparse window", case=REPLICATED)
def test_hsdp_trains_like_one_process(pool: Pool, case: Case) -> None:
    """Each half of four ranks has a complete model."""
    assert_like_one_process(pool, case, 4)


@pytest.mark.parametrize(("method", "world"), [("mfac", 3), ("kfac_eigen", 1)])
def test_one_and_three_ranks_train_like_one_process(pool: Pool, method: str, world: int) -> None:
    assert_like_one_process(pool, Case(method), world)


SHARES = {"hylo_kid": "mem", "hylo_kis": "mem", "kfac_cholesky": "local_factors", "kfac_eigen": "chief_own"}


@only("hylo_kid", "kfac_eigen", method=list(SHARES))
def test_where_the_share_of_a_rank_matters_sharded_models_train_like_replicated_ones(pool: Pool, method: str) -> None:
    strategy = SHARES[method]
    case = Case(method, strategy=strategy)
    sharded = pool.run(sharded_path, case, world=2)
    replicated = pool.run(together, strategy, Run("odd", method, steps=case.steps), world=2)
    assert_replicas(sharded)
    assert distance(sharded[0], replicated[0]) <= 1e-9


@only("mfac", method=["kfac_eigen", "mfac"])
def test_passes_in_bfloat16_stay_close_to_those_of_one_process(pool: Pool, method: str) -> None:
    case = Case(method, "even", wrap=Wrap(low=True), steps=6)
    paths = pool.run(sharded_path, case, world=2)
    assert distance(paths[0], alone(case)) < 0.05
    assert not torch.equal(paths[0], alone(case))


def discarded(rank: int, world: int, case: Case) -> list[tuple[Tensor, dict[Any, Any]]]:
    """Parameters and state after some steps, without and with another batch before each step that is discarded."""
    found = []
    for disturbed in (False, True):
        model, optimizer = started(rank, world, case)
        for step in range(3):
            batches = [case.batch(100 + step)] * disturbed + [case.batch(step)]
            for inputs, targets in (shard(batch, rank, world) for batch in batches):
                model.zero_grad()
                case.loss(model(inputs.to(device_of(rank))), targets.to(device_of(rank))).backward()
            optimizer.step()
            model.zero_grad()
        optimizer.consolidate_state_dict(to=None)
        found.append((flat(model), optimizer.state_dict()["state"]))
        optimizer.close()
    return found


@pytest.mark.parametrize("method", ["kfac_eigen", pytest.param("ekfac_intra", marks=pytest.mark.slow)])
def test_a_batch_that_zero_grad_of_the_model_discards_is_not_in_the_estimate(pool: Pool, method: str) -> None:
    for plain, disturbed in pool.run(discarded, Case(method, wrap=EACH), world=2):
        assert torch.equal(disturbed[0], plain[0])
        torch.testing.assert_close(disturbed[1], plain[1], rtol=0, atol=0)
