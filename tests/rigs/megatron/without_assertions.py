"""Run as `python -O -m rigs.megatron.without_assertions`: two patches where Megatron's assertions are gone.

Prints JSON: whether the ranks have assertions; the gradient norm of each step without overlap, with the defect,
and with the patch; and the largest number of forward pre-hooks of a module once they were enabled twice.
"""

import json

from megapatch import apply, restore
from megapatch.testing import init_parallel, run_ranks, tiny_gpt
from rigs.megatron.grad_ready import run_case
from rigs.megatron.options import ADAM

CUTS = (2,), (1, 1, 1)


def norms(**options):
    steps, error, _ = run_case("later", CUTS, {}, **options)
    return error or [norm for norm, *_ in steps]


def hooks():
    (chunk,) = tiny_gpt(
        **ADAM, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ).chunks
    chunk.enable_forward_pre_hook()
    return max(len(module._forward_pre_hooks) for module in chunk.modules())


def job(rank, world_size):
    restore()
    init_parallel()
    found = {"assertions": __debug__, "expected": norms(overlap=False)}
    for what, prepare in {"defect": restore, "repaired": apply}.items():
        prepare()
        found[what] = norms(at_once=what == "defect")
        found[f"hooks, {what}"] = hooks()
    return found


if __name__ == "__main__":
    print(json.dumps(run_ranks(job, 2)[0]))
