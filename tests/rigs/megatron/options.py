"""Options of the tiny GPT, reference runs, and probes, for tests of Megatron's patches."""

import contextlib
import importlib
import multiprocessing
import warnings

import pytest
import torch

from megapatch.testing import init_parallel, megatron_training_available, tiny_gpt

needs_training = pytest.mark.skipif(
    not megatron_training_available(), reason="this megatron-core has no megatron.training (wheels: from 0.17)"
)

UNPATCHED = {"MEGAPATCH_DISABLE": "*"}
ADAM = {"optimizer": "adam", "lr": 0.5, "optim": {"adam_eps": 1.0}}  # nearly SGD, which distopt does not take
GRADS = {"overlap_grad_reduce": True}
BOTH = {**ADAM, **GRADS, "overlap_param_gather": True, "use_distributed_optimizer": True}


class Interrupted(Exception):
    """Raised by tests in the middle of Megatron's functions."""


def plain_steps(rank, world_size, layout, options, steps):
    """Train by calling Megatron's pieces, without overlap: the reference. Return (loss, parameters) by step."""
    init_parallel(**layout)
    model = tiny_gpt(layers=4, **options)
    return [(model.train_step(step).loss, model.parameters()) for step in range(steps)]


def assert_same(got, reference, first=0):
    """Compare each rank's (losses, parameters at the end) with the reference's steps from `first` on."""
    for (losses, parameters), steps in zip(got, reference, strict=True):
        steps = steps[first : first + len(losses)]
        assert losses == pytest.approx([loss for loss, _ in steps], rel=1e-6)
        assert_same_parameters(parameters, steps[-1][1])


def assert_same_parameters(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextlib.contextmanager
def raising_half_way(model, microbatch):
    """Raise when the second of four layers is differentiated, with the gradients of later layers under way."""
    calls = iter(range(microbatch + 1))

    def hook(*ignored):
        if next(calls) == microbatch:
            raise Interrupted

    module = model.chunks[0].module
    module = getattr(module, "module", module)  # a Float16Module's
    handle = module.decoder.layers[1].register_full_backward_hook(hook)
    try:
        with warnings.catch_warnings():
            # torch does not see inputs that are passed by keyword, and takes the layer for one without any.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield
    finally:
        handle.remove()


def hooks_of(config):
    return {name: value for name, value in vars(config).items() if name.endswith("_func")}


def buckets(ddp):
    return sum(len(group.buckets) for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups)


def rerun():
    return importlib.import_module("megatron.core.rerun_state_machine")


def new_machine(mode="VALIDATE_RESULTS"):
    """Replace the rerun state machine by a new one, and return it."""
    rerun().destroy_rerun_state_machine()
    rerun().initialize_rerun_state_machine(mode=rerun().RerunMode[mode])
    return rerun().get_rerun_state_machine()


def rerun_data(rank):
    return rerun().RerunDataIterator(iter(range(100 * rank, 100 * rank + 100)))


def iterate(machine, data, faulty=False):
    """Run one iteration of two microbatches, as train_step() does; return the machine's answer and its state.

    faulty   the results are NaN; validated from a machine's second iteration on
    """
    while machine.should_run_forward_backward(data):
        for _ in range(2):
            number = float(next(data))
            result = torch.tensor(float("nan") if faulty else number)
            machine.validate_result(result, rejection_func=torch.isnan, message="NaN", fatal=True)
    return machine.should_checkpoint_and_exit(), machine.state.name


def quick_writer(name="megatron.core.dist_checkpointing.strategies.filesystem_async"):
    """Let a module's writer of checkpoints collect its results in a process forked from this one.

    Megatron starts a new process, which takes seconds to import all of Megatron.
    """
    module = importlib.import_module(name)
    assert hasattr(module, "_results_queue")
    module._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def attempt(function, *args, **kwargs):
    """Return (None, result), or the error's name and text. torch's CheckpointException is not an Exception."""
    try:
        return None, function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return type(error).__name__, str(error)


def assert_misuse(outcome, *texts):
    """Check what `attempt` returned of a call that is refused, for a reason with these texts."""
    error, found = outcome
    assert error == "MisuseError"
    for text in texts:
        assert text in found


def linear_schedule(
    optimizer, *, steps, max_lr, init_lr=0.0, min_lr=0.0, warm_up=0, start_wd=0.0, end_wd=0.0, **flags
):
    """Return Megatron's own schedule: the learning rate falls, and weight decay rises, in this many steps.

    Raises ValueError where it would not fall: the rates of a group come before those of the schedule.
    """
    if any(group.get("max_lr", 1) == group.get("min_lr", 0) for group in optimizer.param_groups):
        raise ValueError("linear_schedule(): the rate of a group is constant, as its min_lr is its max_lr")
    module = importlib.import_module("megatron.core.optimizer_param_scheduler")
    return module.OptimizerParamScheduler(
        optimizer,
        init_lr=init_lr,
        max_lr=max_lr,
        min_lr=min_lr,
        lr_warmup_steps=warm_up,
        lr_decay_steps=steps,
        lr_decay_style="linear",
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=steps,
        **{"wd_incr_style": "linear", **flags},
    )
