"""Measure what megatron.save-plan-cache costs, compared with the planning that it makes unnecessary.

    python benchmarks/save_plan.py

The patch looks at the tree that is saved, to see whether it has changed. Two ranks on CPU plan to save the same
10,000 leaves repeatedly; nothing is written. Prints the times of one run side by side, their ratio, and the
promised limit; exits with 1 if the limit is broken. Times are the best of a few rounds on the slower rank, because
other load on the machine can only add to them. Needs megapatch, torch and megatron-core.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import sys
import tempfile
import time

import torch

from megapatch.patches.megatron.save_plan_cache import redistribute_when_changed, replan_when_changed
from megapatch.testing import init_parallel, run_ranks

LEAVES, ROUNDS = 10_000, 6
LIMIT = 0.02  # of the planning time


def leaves(rank):
    """Return the tree of a model with its optimizer: replicated tensors, halves of tensors, and some objects."""
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    part, data = mapping.ShardedTensor.from_rank_offsets, torch.ones(4)
    tree = {"model": {}, "optimizer": {"state": []}}
    for index in range(LEAVES // 10):
        name = f"decoder.layers.{index}"
        tree["model"][f"{name}.extra"] = mapping.ShardedObject(f"{name}.extra", b"", (2,), (rank,))
        for number in range(5):
            weight = f"{name}.mlp.experts.linear_fc{number}.weight"
            tree["model"][weight] = part(weight, data, (0, rank, 2))
        for kind in ("exp_avg", "exp_avg_sq", "param", "master"):
            state = f"optimizer.state.{kind}.{name}.mlp.linear.weight"
            tree["optimizer"]["state"].append(part(state, data, replica_id=rank))
    return tree


def seconds(function, *args):
    torch.distributed.barrier()
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure(rank, world_size, folder):
    init_parallel()
    strategies = "megatron.core.dist_checkpointing.strategies"
    strategy = importlib.import_module(f"{strategies}.torch").TorchDistSaveShardedStrategy
    writer = importlib.import_module(f"{strategies}.filesystem_async")
    # Megatron would start its queue in a new process, which would import all of this.
    writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    wrapper = importlib.import_module(f"{strategies}.fully_parallel").FullyParallelSaveStrategyWrapper
    kwargs = {"async_strategy": "mcore"} if "async_strategy" in signature(strategy.async_save) else {}
    found = {}
    looks = [replan_when_changed(lambda self, tree: None), redistribute_when_changed(lambda self, tree: None)]
    for round_ in range(ROUNDS):  # in turns, so that a busy machine slows all of them
        plain = strategy("torch_dist", 1, thread_count=1, cached_metadata=True)
        inner = strategy("torch_dist", 1, thread_count=1, cached_metadata=True)
        parallel = wrapper(inner, None, do_cache_distribution=True)
        times = {}
        for kind, saves, owners in (("plain", plain, [plain]), ("parallel", parallel, [inner, parallel])):
            tree = leaves(rank)
            save = functools.partial(saves.async_save, tree, folder, **kwargs)
            times.update({(kind, name): seconds(save) for name in ("first", "second", "later")})
            added = [repeated(look, owner, tree) for look, owner in zip(looks, owners, strict=False)]
            times[kind, "added"] = min(sum(seconds(look) for look in added) for _ in range(20))
        if round_:  # in the first round Megatron starts what it starts once
            for name, value in times.items():
                found[name] = min(value, found.get(name, value))
    return found


def repeated(look, owner, tree):
    look(owner, tree)  # the next calls compare with this tree
    return functools.partial(look, owner, tree)


def signature(function):
    return inspect.signature(function).parameters


def main() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(measure, 2, folder, timeout=600.0, env={"MEGAPATCH_DISABLE": "*"})
    slower = {name: max(times[name] for times in found) for name in found[0]}
    print(f"{LEAVES} leaves on each of 2 ranks")
    return all([_compare("plain", slower), _compare("parallel", slower)])


def _compare(kind: str, slower: dict) -> bool:
    texts = {
        "first": "a first save, up to writing",
        "second": "the second save, which validates the plan",
        "later": "a later save, which uses it",
    }
    print(f"\n{'with --ckpt-fully-parallel-save' if kind == 'parallel' else 'without --ckpt-fully-parallel-save'}")
    for name, text in texts.items():
        print(f"  {text:40} {slower[kind, name] * 1e3:8.1f} ms")
    planning, added = slower[kind, "first"] - slower[kind, "later"], slower[kind, "added"]
    kept = added <= LIMIT * planning
    print(f"  {'so planning takes':40} {planning * 1e3:8.1f} ms")
    print(f"  {'the patch adds to each':40} {added * 1e3:8.1f} ms  {added / planning:6.2%} of planning", end="")
    print(f"; at most {LIMIT:.0%}: {'kept' if kept else 'BROKEN'}")
    return kept


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
