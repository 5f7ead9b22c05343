"""Tests that mean nothing on the fake GPU, each with the reason; `tox -e fake_gpu-py312` skips them."""

_NO_DTENSOR = "the fake GPU knows no DTensor"
_RACES = "its defect is a race, which the fake GPU raises before a number is wrong"
_LAYOUTS = "patches/megatron/test_gathered_when_read_layouts.py::test_streams_in_layouts"
_DROPPED_STEP = "patches/megatron/test_parameters_without_gradients_dropped_step.py"
_READERS = "patches/megatron/test_gathered_when_read.py"
_FSDP2 = "patches/megatron/test_torch_fsdp2_finalize.py"

NOT_ON_FAKE_GPU = {
    "audit/test_quiet.py::test_nothing_is_found[FSDP2]": _NO_DTENSOR,
    f"{_FSDP2}::test_without_the_patch_gradients_cannot_be_finalized": _NO_DTENSOR,
    f"{_FSDP2}::test_gradients_are_finalized": _NO_DTENSOR,
    f"{_READERS}::test_megatrons_readers_give_the_parameters_of_a_run_without_overlap[swap_model_weights]": (
        "Megatron's GlooCopyService copies in a stream that does not wait for the one that wrote (0.19.2)"
    ),
    f"{_LAYOUTS}[dp2 pp2 vpp2, gathered in the step]": _RACES,
    f"{_LAYOUTS}[dp2 pp2 vpp2 ep2, gathered in the step]": _RACES,
    f"{_DROPPED_STEP}::test_without_the_patch_it_is_not": _RACES,
    "patches/megatron/test_groups_destroyed.py::test_groups_that_nothing_refers_to_are_destroyed": (
        "it counts threads, and the fake GPU has threads of its own"
    ),
}
