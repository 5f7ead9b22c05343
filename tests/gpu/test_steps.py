"""Steps with patches in place, on the GPUs that are there and on CPU: what they wait for, gather and hold."""

from __future__ import annotations

import pytest
import torch
from rigs.gpu import ranks as gpu
from rigs.train_step.timeline import hidden, reduces_of, timeline

pytestmark = pytest.mark.thorough


def test_a_step_waits_for_the_device_no_more_often_than_without_patches(place):
    for without, with_patches in place.run(gpu.waits_of_a_step):
        assert with_patches == without > 0


def test_reading_parameters_adds_no_gather(place):
    for without, reading in place.run(gpu.gathers_of_reads):
        assert reading == without > 0


def test_the_reduce_of_a_split_step_begins_during_its_last_backward_pass(place, tmp_path):
    events = place.run(gpu.traced, True)[0]
    picture = tmp_path / "overlap.svg"
    picture.write_text(timeline(events))
    print(f"a picture of the call: {picture}")
    # The loss has some of its own; where nobody knows that the call is the last one, no others are in it.
    unknown = place.run(gpu.traced, False)[0]
    assert hidden(events) > hidden(unknown) == len(reduces_of(unknown))


def test_a_split_step_and_a_read_take_no_more_memory(on_gpus):
    for one_call, split, read in on_gpus.run(gpu.memory):
        assert split <= 1.05 * one_call + 2**16
        assert read <= 2**16


def test_a_cuda_graph_is_that_of_the_same_pass(on_gpus):
    for eager, captured in on_gpus.run(gpu.graph_and_eager):
        torch.testing.assert_close(captured, eager)


def test_a_compiled_pass_is_that_of_the_same_pass(on_gpus):
    env = {"TORCHDYNAMO_DISABLE": "0"}
    for eager, compiled in on_gpus.run(gpu.compiled_and_eager, env=env):
        torch.testing.assert_close(compiled, eager)
