"""Fixtures: the devices that are there, and how many threads."""

import zlib

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("helpers")
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes what time it takes
hypothesis.settings.load_profile("any machine")


# Tests with many cases of one kind: one case in so many is run by default, and the others are slow. A hash of
# the case decides, so that no space and no section is favoured.
THINNED = {
    "test_exp_inverts_log_of_any_points": 5,
    "test_forward_and_reverse_mode_are_differences": 9,
    "test_jacobians_and_second_derivatives_of_distances": 2,
    "test_a_vmap_is_a_stack": 2,
    "test_a_logarithm_found_by_iteration_has_its_derivative": 8,
    "test_resume_is_exact_for_every_optimizer_space_and_section": 4,
    "test_a_step_does_not_depend_on_how_a_weight_is_spread": 4,
    "test_dcp_between_one_process_and_two": 2,
    "test_fsdp": 3,
    "test_1000_steps": 3,
    "test_a_stack_is_its_weights_one_by_one": 3,
    "test_every_optimizer_descends_and_stays": 3,
    "test_it_is_the_dense_algorithm": 3,
    "test_no_step_is_too_long_for_the_space": 3,
    "test_resumes_from_its_state_dict": 3,
    "test_goes_the_right_way_and_stays": 3,
    "test_runs_repeat_to_the_bit": 3,
    "test_every_method_finds_a_critical_point_on_every_compact_space": 3,
    "test_schedules_are_torchs": 3,
    "test_the_iteration_on_gram_matrices_is_that_on_the_blocks": 3,
    "test_four_threads_give_what_one_gives": 2,
    "test_solvers_with_four_threads_do_what_they_do_with_one": 4,
    "test_nan_is_no_success": 2,
    "test_a_start_with_nan_is_refused": 2,
    "test_fsdp_on_every_space": 2,
    "test_ddp": 2,
    "test_step": 2,
    "test_copies": 3,
    "test_other_implementations_match_the_loop": 2,
    "test_options_of_groups_override_those_of_the_optimizer": 2,
    "test_steps_that_do_not_move": 2,
    "test_euclidean_parameters_are_torchs_bit_for_bit": 2,
    "test_blocks_are_a_batch": 3,
}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        one_in = THINNED.get(getattr(item, "originalname", item.name), 1)
        if one_in > 1 and zlib.crc32(item.name.encode()) % one_in:
            item.add_marker(pytest.mark.slow)


def devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = sorted({"cpu", "cuda", "mps"} - set(devices()))
    terminalreporter.write_line(
        f"devices tried: {', '.join(devices())}; not there, not tried: {', '.join(missing) or 'none'}"
    )


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)
