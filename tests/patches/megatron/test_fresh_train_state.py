"""megatron.fresh-train-state on modules like Megatron-Bridge's; on the real one, see the test of Bridge."""

from __future__ import annotations

import importlib

import pytest
from rigs.diagnosed_sources import NOTHING, each_source

from megapatch.patches.megatron.fresh_train_state import READERS, diagnose, read_again

READS = """
import functools
found = [1]

@functools.lru_cache
def read_train_state(name):
    return [*found]

@functools.lru_cache
def read_run_config(name):
    return [*found]

def _load_checkpoint_from_path(load_dir):
    return read_train_state(load_dir), read_run_config(load_dir)
"""
SOURCES = {
    diagnose: {
        "it caches": (READS, "needed", "read_train_state and read_run_config are cached"),
        "it caches nothing": (READS.replace("@functools.lru_cache", ""), "fixed", "is not cached"),
        "it clears": (
            READS.replace("    return read_train", "    read_train_state.cache_clear()\n    return read_train"),
            "fixed",
            "clears the caches",
        ),
        "it reads by another name": (
            READS.replace("read_run_config", "read_config"),
            "unknown",
            "read_run_config",
        ),
        "there is nothing": (NOTHING, "unknown", "_load_checkpoint_from_path"),
    },
}
test_verdicts = each_source(SOURCES)


@pytest.mark.quick
def test_each_load_reads_again(modules):
    module = importlib.import_module(modules.write(READS))
    load = module._load_checkpoint_from_path
    for patched in (False, True):
        read = read_again(load) if patched else load
        for name in READERS:
            getattr(module, name).cache_clear()
        module.found[:] = [1]
        state, _ = read("a folder")
        state.append("counted up")
        module.found[:] = [2]
        expected = ([2], [2]) if patched else ([1, "counted up"], [1])
        assert read("a folder") == expected
        assert module.read_train_state("a folder") == expected[0]
        module.found[:] = [3]  # what was read outside of a load is read again in it, too
        assert read("a folder") == (([3], [3]) if patched else expected)
