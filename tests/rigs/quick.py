"""The tests of `tox -e quick`, which get the marker `quick`. CI leaves them out where it would run them again.

Each of Megatron's patches has one that shows the defect, where that takes no run of its own, and one that shows
the repair.
"""

from __future__ import annotations

_MEGATRON = "patches/megatron/"

OF_PATCHES = {
    "megatron.aux-loss-over-context-parallel": (
        "test_without_the_patch_two_ranks_halve_the_losses",
        "test_losses_weigh_as_much_as_without_context_parallel",
    ),
    "megatron.expert-streams-loaded": (
        "test_without_the_patch_nothing_is_said",
        "test_a_rank_that_loads_another_ones_streams_says_so",
    ),
    "megatron.forward-pre-hook": (
        "test_without_the_patch_a_repeated_call_fails",
        "test_switching_hooks_between_steps_gives_the_numbers_of_a_run_without_overlap",
    ),
    "megatron.fresh-metadata": (
        "test_without_the_patch_values_change_places_or_the_load_fails",
        "test_a_checkpoint_is_read_with_its_own_metadata",
    ),
    "megatron.fully-reshardable-states": (
        "test_without_the_patch_parameters_are_saved_with_others_states",
        "test_each_parameter_is_saved_with_its_own_state",
    ),
    "megatron.gathered-when-read": (
        "test_without_the_patch_what_one_rank_reads_is_a_mixture",
        "test_megatrons_readers_give_the_parameters_of_a_run_without_overlap",
    ),
    "megatron.grad-ready-window": (
        "test_without_the_patch_other_windows_than_the_first_fail_or_go_wrong",
        "test_every_step_is_as_without_overlap_and_usual_steps_overlap",
    ),
    "megatron.groups-destroyed": ("test_groups_that_nothing_refers_to_are_destroyed",),
    "megatron.load-offloaded-state": (
        "test_without_the_patch_loading_fails_or_training_continues_from_another_step",
        "test_a_resumed_run_equals_one_that_continued",
    ),
    "megatron.main-params-after-load": (
        "test_without_the_patch_a_load_of_weights_is_undone",
        "test_steps_are_those_of_new_objects_that_loaded_the_same",
    ),
    "megatron.nested-no-sync": (
        "test_without_the_patch_the_inner_no_sync_ends_the_outer_one",
        "test_a_step_cut_in_pieces_is_the_step_of_one_single_call",
    ),
    "megatron.own-save-results": (
        "test_without_the_patch_values_change_places",
        "test_a_save_is_complete_whatever_became_of_those_before",
    ),
    "megatron.override-after-load": (
        "test_without_the_patch_the_rate_is_the_checkpoints_or_the_load_fails",
        "test_with_the_flag_the_rate_is_the_runs_own",
    ),
    "megatron.parameters-without-gradients": (
        "test_without_the_patch_the_step_ends_with_an_error",
        "test_every_step_is_as_without_overlap",
    ),
    "megatron.prepare-grads-once": (
        "test_without_the_patch_gradients_are_unscaled_twice_and_the_scaler_moves_twice",
        "test_the_numbers_are_those_of_a_caller_of_step_alone",
    ),
    "megatron.reload-offloaded-params": (
        "test_without_the_patch_the_first_step_brings_the_old_weights_back",
        "test_steps_are_those_without_offloading",
    ),
    "megatron.rerun-state-dict": (
        "test_without_the_patch_only_the_idle_state_differs",
        "test_an_enabled_machine_gives_the_same_structure_whether_a_rerun_is_pending_or_not",
    ),
    "megatron.rerun-transient-fault": (
        "test_without_the_patch_a_transient_fault_is_saved_and_cannot_be_resumed",
        "test_with_the_patch_the_job_ends_and_nothing_is_saved",
    ),
    "megatron.save-fails-everywhere": (
        "test_without_the_patch_a_rank_waits_for_one_that_has_failed",
        "test_a_save_that_fails_on_one_rank_fails_on_the_others",
    ),
    "megatron.save-plan-cache": (
        "test_without_the_patch_a_change_is_lost",
        "test_a_change_is_planned_once_by_all_ranks_and_saved",
    ),
    "megatron.scheduler-after-load": (
        "test_without_the_patch_steps_add_up",
        "test_training_goes_the_same_way_again",
    ),
    "megatron.strict-loads-with-new-torch": (
        "test_without_the_patch_only_the_default_loads",
        "test_every_strictness_loads",
    ),
    "megatron.torch-fsdp2-finalize": (
        "test_without_the_patch_gradients_cannot_be_finalized",
        "test_gradients_are_finalized",
    ),
    "megatron.train-reentry": (
        "test_without_the_patch_a_second_call_fails_three_times_over",
        "test_three_calls_give_the_numbers_of_a_run_without_overlap_and_without_train",
    ),
    "megatron.zero-tokens": (
        "test_without_the_patch_one_empty_microbatch_makes_the_gradient_nan",
        "test_a_step_with_an_empty_microbatch_has_the_gradient_of_the_others",
    ),
}


def _file_of(patch: str) -> str:
    return f"{_MEGATRON}test_{patch.partition('.')[2].replace('-', '_')}.py"


# A wrong divisor in TrainStep fails here, too.
OF_TRAIN_STEP = {
    f"train_step/test_parity.py::test_a_step_in_pieces_is_megatrons_step[{case}-uneven]"
    for case in ("dp2, tokens, overlap", "dp2, distributed optimizer, both", "dp2, fp16", "pp2, tokens")
}

# Before 0.17 no wheel has a train(): there nothing else asks these of megatron.train-reentry.
OF_AROUND_TRAIN = {
    f"{_MEGATRON}test_around_train.py::{test}"
    for test in (
        "test_timers_of_the_call_are_stopped_and_the_callers_run_on",
        "test_the_rerun_machine_is_before_the_step_and_in_its_mode",
        "test_only_its_own_no_sync_is_removed_and_an_exception_restores_all_hooks",
        "test_after_an_interrupted_step_the_numbers_are_those_of_a_run_without_overlap",
    )
}

QUICK = (
    OF_TRAIN_STEP
    | OF_AROUND_TRAIN
    | {f"{_file_of(patch)}::{test}" for patch, tests in OF_PATCHES.items() for test in tests}
)


def is_quick(nodeid: str) -> bool:
    """Return whether a test, as pytest names it, is one of them; with all its parameters, if QUICK names none."""
    place = nodeid.removeprefix("tests/")
    return place in QUICK or place.partition("[")[0] in QUICK
