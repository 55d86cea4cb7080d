"""Settings of every test: one thread per process, one seed, a GPU only where there is one."""

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; processes × threads would crawl otherwise

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

if TYPE_CHECKING:
    from tests.distributed.pool import Pool

# Trainers and loggers are in the environment of `make test-integrations` only; elsewhere their tests are not looked at.
collect_ignore = [] if importlib.util.find_spec("transformers") else ["integrations"]

# The same examples in every run: a failure that one run finds is there for the next one too. No deadline: the first
# example of a property pays for whatever torch sets up lazily.
settings.register_profile("secondorder", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("secondorder")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend nccl` runs the distributed tests on as many ranks as there are devices."""
    parser.addoption("--backend", default="gloo", choices=("gloo", "nccl"), help="of the process groups of tests")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> "Iterator[Pool]":
    """Processes that play the ranks of a process group; started by the first test that wants them."""
    from tests.distributed.pool import Pool

    processes = Pool(backend=request.config.getoption("--backend"))
    yield processes
    processes.close()


#: Tests of several ranks with many cases: of how many one is run by default; the others are slow.
ONE_IN = {
    "test_shards_equal_the_joined_batch": 13,
    "test_every_kind_of_layer": 6,
    "test_bytes_sent": 16,
    "test_a_rank_plans_the_world_it_is_in": 8,
    "test_replicas_are_equal_for_200_steps": 6,
    "test_a_repeated_run_has_the_same_bits": 12,
    "test_from_two_ranks_to_others": 5,
    "test_sngd_of_every_kind_of_rows": 3,
    "test_elsewhere_it_goes_on_alike": 4,
    "test_windows_in_parts_go_everywhere_once_gathered": 2,
    "test_rows_of_every_kind_of_layer": 8,
    "test_each_layer_takes_the_cheaper_route": 5,
    "test_lockstep_is_the_delayed_run_in_other_settings": 5,
    "test_ranks_do_what_one_process_does": 4,
    "test_from_other_worlds": 3,
    "test_factors_that_replace_rows": 3,
    "test_chosen_rows_are_those_of_every_shard": 3,
    "test_batch_with_a_nan_on_one_rank_is_dropped_by_all": 4,
    "test_layer_used_on_one_rank_and_layer_used_nowhere": 3,
    "test_selected_rows_do_not_depend_on_the_strategy": 2,
    "test_roles": 3,
    "test_the_end_comes_at_any_step_of_any_role": 2,
    "test_sngd_of_unequal_batches_is_that_of_the_joined_batch": 3,
    "test_checkpoints_go_on_in_every_world": 2,
    "test_every_method_does_what_one_process_does": 16,
    "test_every_option_means_what_it_means_in_one_process": 26,
    "test_the_strategy_changes_nothing_in_the_result": 24,
    "test_parameters_may_be_cut_and_kept_in_any_way": 5,
    "test_replicas_of_a_sharded_model": 5,
    "test_other_numbers_of_ranks": 4,
    "test_sharded_and_replicated_models_take_the_same_steps": 6,
    "test_bfloat16_passes_keep_float32_curvature": 2,
    "test_layers_go_on_in_every_world": 8,
    "test_layers_of_four_ranks_go_on_with_fewer": 8,
    "test_windows_go_on_with_the_same_ranks": 8,
    "test_windows_go_everywhere_once_gathered": 8,
    "test_every_rank_goes_on_from_its_own_file": 16,
    "test_a_file_of_one_rank_goes_on_in_one_process": 16,
    "test_a_gradient_is_gathered_once_and_only_where_it_is_preconditioned": 5,
    "test_windows_move_what_their_cut_and_that_of_the_parameters_differ_in": 5,
    "test_directions_are_rounded_where_that_was_asked_for_and_gradients_never": 2,
    "test_dense_rows_are_cut_as_parameters_are_and_nothing_travels": 3,
    "test_an_optimizer_made_before_sharding_says_so_at_its_first_step": 2,
    "test_join_is_refused": 2,
    "test_curvature_of_layers_is_on_its_owner_alone": 3,
    "test_every_parameter_is_covered": 4,
    "test_formulas_are_what_is_held": 3,
    "test_a_run_goes_on_to_the_bit": 3,
    "test_a_few_steps_lower_the_loss": 2,
    "test_windows_are_cut_over_the_ranks": 3,
    "test_sparse_windows_are_cut_evenly_too": 2,
    "test_a_nan_in_the_piece_of_one_rank_drops_the_step_on_all": 6,
    "test_a_gate_that_is_closed_on_the_device_changes_nothing": 5,
    "test_layers_that_are_not_used_wait": 6,
    "test_windows_take_tensor_parallel_modules": 8,
    "test_layer_methods_leave_tensor_parallel_layers_to_the_fallback_when_asked": 3,
    "test_what_cannot_serve_sharded_parameters_is_refused_at_construction": 3,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of long tests as slow, and skip tests marked ``gpu`` on a machine without a CUDA device."""
    seen: dict[str, int] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        folder = item.path.parent.name
        long = folder in ("distributed", "window", "fsdp", "benchmarks") and name in ONE_IN
        if long and not item.get_closest_marker("slow"):
            seen[name] = seen.get(name, -1) + 1
            if seen[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state and on one thread, whatever ran before it in the same process."""
    torch.manual_seed(0)
    if torch.get_num_threads() != 1:  # commands of the benchmarks set their own number
        torch.set_num_threads(1)
