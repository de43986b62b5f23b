"""Fixtures: the devices that are there, and how many threads."""

import zlib

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("helpers")
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes what time it takes
hypothesis.settings.load_profile("any machine")


# Products of cases. By default one case is run for every word of their names: each space, each section, each
# optimizer once, not each with each other. The others are slow.
EACH_WORD = {
    "test_a_batch_is_its_members_one_by_one",
    "test_a_killed_run_ends_as_if_it_was_left_alone",
    "test_a_loss_that_is_not_finite",
    "test_a_rule_without_a_frame_moves_as_with_one",
    "test_a_run_in_each_dtype_follows_float32",
    "test_a_sphere_of_another_radius_is_the_unit_sphere_in_other_units",
    "test_a_stack_is_its_weights_one_by_one",
    "test_a_start_with_nan_is_refused",
    "test_a_step_does_not_depend_on_how_a_weight_is_spread",
    "test_a_step_is_that_of_matrices",
    "test_a_write_and_a_missing_gradient_leave_the_others_alone",
    "test_all_optimizers_descend",
    "test_autocast_forward",
    "test_blocks_are_a_batch",
    "test_copies",
    "test_copies_go_on_alike",
    "test_copies_go_on_to_the_bit",
    "test_each_weight_as_if_it_were_alone",
    "test_euclidean_parameters_are_torchs_bit_for_bit",
    "test_every_method_finds_a_critical_point_on_every_compact_space",
    "test_every_optimizer_descends_and_stays",
    "test_exp_inverts_log_of_any_points",
    "test_float32_stays_on_the_space",
    "test_foreach_is_the_loop",
    "test_frames_are_those_of_the_dense_references",
    "test_fsdp",
    "test_groups_are_optimizers_of_their_own",
    "test_goes_the_right_way_and_stays",
    "test_it_is_the_dense_algorithm",
    "test_it_is_the_dense_algorithm_in_the_coordinates_of_the_space",
    "test_loads_state_dicts_of_older_versions",
    "test_momentum_does_not_see_the_gauge",
    "test_nan_is_no_success",
    "test_nan_stays_in_its_member",
    "test_no_gauge",
    "test_no_step_is_too_long_for_the_space",
    "test_no_velocity_is_no_step",
    "test_on_the_space_and_resume_to_the_bit",
    "test_optimizers_find_declared_spaces",
    "test_other_dtypes",
    "test_other_implementations_match_the_loop",
    "test_points_are_those_of_the_dense_references",
    "test_resume_and_copies_to_the_bit",
    "test_resume_is_exact",
    "test_resume_is_exact_for_every_optimizer_space_and_section",
    "test_resume_of_narrow_weights",
    "test_resume_to_the_bit",
    "test_resumes_from_its_state_dict",
    "test_runs_repeat_to_the_bit",
    "test_schedules_are_torchs",
    "test_shapes_are_broadcast",
    "test_solvers_with_four_threads_do_what_they_do_with_one",
    "test_steps_that_do_not_move",
    "test_tensor_learning_rate",
    "test_the_iteration_on_gram_matrices_is_that_on_the_blocks",
    "test_the_radius_of_the_start_does_not_drift",
    "test_the_rate_of_decay",
    "test_the_svd_problem_of_the_authors",
    "test_writes_are_followed",
}
# Where a single case takes a second, one in so many.
ONE_IN = {
    "test_a_logarithm_found_by_iteration_has_its_derivative": 8,
    "test_a_vmap_is_a_stack": 3,
    "test_1000_steps": 3,
    "test_dcp_between_one_process_and_two": 2,
    "test_ddp": 2,
    "test_forward_and_reverse_mode_are_differences": 11,
    "test_four_threads_give_what_one_gives": 7,
    "test_fsdp_on_every_space": 2,
    "test_jacobians_and_second_derivatives_of_distances": 2,
    "test_step": 2,
}


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: dict[str, set[str]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.name.encode())):  # none is favoured
        name, _, case = item.name.rstrip("]").partition("[")
        if name in EACH_WORD:
            known = seen.setdefault(f"{item.path}{name}", set())
            slow = known.issuperset(case.split("-"))
            known.update(case.split("-"))
        else:
            slow = zlib.crc32(item.name.encode()) % ONE_IN.get(name, 1) != 0
        if slow:
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
