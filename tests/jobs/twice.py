"""twice.py main|train STEP SCRIPT [flags]: runs in one process twice what a script runs once.

main   its main: to `--exit-interval STEP`, then to the end, from the checkpoint
train  Megatron's train(), which its pretrain() calls: to STEP, then to the end
"""

import functools
import os
import runpy
import sys

if os.environ.get("JOB_IMPORT"):
    import megapatch  # noqa: F401 (as docs/megatron.md has it)


def run(script, flags):
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print(f"JOB ended with {ended.code}", flush=True)


def take_down():
    """Take down what pretrain() sets up; torch's default group stays, as Megatron uses one that is there."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.training import global_vars

    parallel_state.destroy_model_parallel()
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


def call_twice(train, step):
    from megatron.training import get_args

    @functools.wraps(train)
    def train_twice(*args, **kwargs):
        settings = get_args()
        end, settings.train_iters = settings.train_iters, step
        # the caller's part: see docs/megatron.md
        settings.iteration, settings.num_floating_point_operations_so_far = train(*args, **kwargs)
        settings.train_iters = end
        return train(*args, **kwargs)

    return train_twice


def main(what, step, script, *flags):
    if what == "train":
        from megatron.training import training

        training.train = call_twice(training.train, int(step))
        run(script, flags)
    else:
        run(script, [*flags, "--exit-interval", step])
        take_down()
        run(script, flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
