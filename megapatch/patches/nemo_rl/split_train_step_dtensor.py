"""NeMo-RL's DTensor workers can split a train step over several calls.

Symptom   AttributeError: an asynchronous controller that trains on rollouts as they arrive calls begin_train_step,
          train_microbatch, finish_train_step and abort_train_step, which no release has. On main only the Megatron
          worker has them.
Upstream  NVIDIA-NeMo/RL#2692, #2831: neither was merged.
Seam      adds the four to DTensorPolicyWorkerImpl and DTensorPolicyWorkerV2Impl. The worker's own train(), which
          is untouched, does each call and the end of the step, and the gradients are summed. Ranks with
          fewer microbatches make passes that do not count. Then Ray's actor classes are rebuilt.
Limits    v0.6.0, v0.7.0 and main, with data, context and tensor parallelism: begin_train_step() refuses expert
          parallel models. No cross-tokenizer distillation, and no metric is_oob_ratio in releases. A step in
          which nothing counts on any rank leaves parameters as they are. After an exception the step is over:
          abort_train_step() does nothing then.
Cost      of train() itself: none. Each call computes a gradient norm that nobody reads, and empties CUDA's cache.
"""

from __future__ import annotations

from types import ModuleType

from ...patch import NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from .._ray_actors import actors_of
from ._workers import DTENSOR_WORKERS as WORKERS
from ._workers import names_in, no_worker, settled_by_upstream, split_step_of

OF_TRAIN = ("dp_mesh", "dp_size", "max_grad_norm", "optimizer", "scheduler", "step", "zero_grad")
OF_DATA = ("from_batches", "get_batch", "select_indices", "slice")


def diagnose(module: ModuleType) -> Verdict:
    """Look at the class, and at the names that its train() mentions."""
    actor = WORKERS[module.__name__]
    worker = getattr(module, f"{actor}Impl", None)
    if worker is None:
        return no_worker(module, actor)
    if (settled := settled_by_upstream(worker)) is not None:
        return settled
    mentioned = names_in(worker, "train")
    missing = [f"{name} in {worker.__name__}.train" for name in OF_TRAIN if name not in mentioned]
    missing += unmet.attributes(f"{module.__name__}:", actor, "BatchedDataDict")
    missing += missing or unmet.attributes(f"{module.__name__}:BatchedDataDict", *OF_DATA)
    expect_none(*missing)
    return Verdict(NEEDED, f"{worker.__name__} has only train()")


def site(module: str, actor: str) -> Site:
    worker = f"{actor}Impl"
    return Site(module, diagnose, add=split_step_of(worker, "dtensor"), rebuild=actors_of(worker))


PATCH = Patch(
    name="nemo_rl.split-train-step-dtensor",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2831",
    sites=tuple(site(module, actor) for module, actor in WORKERS.items()),
)
