"""megatron.strict-loads-with-new-torch: loads by the real dist_checkpointing of what torch 2.14 keeps."""

import functools
import importlib
import os
from types import SimpleNamespace

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED, attempt, quick_writer
from rigs.megatron.save import STRICTNESSES
from torch.distributed.checkpoint.metadata import TensorProperties

from megapatch.testing import init_parallel

DEFAULT = STRICTNESSES[0]
NEW_TORCH = "strides" in TensorProperties.__dataclass_fields__


def have_strides():
    """Let an older torch read metadata as 2.14 does: the properties of tensors have strides."""
    if not NEW_TORCH:
        read = TensorProperties.__setstate__

        def read_with_strides(self, state):
            read(self, state)
            self.strides = None

        TensorProperties.__setstate__ = read_with_strides


def tree(value=0.0):
    from megatron.core.dist_checkpointing import ShardedTensor

    names = {"weights": torch.float32, "halves": torch.bfloat16}
    return {
        name: ShardedTensor.from_rank_offsets(name, torch.full((3, 2), value, dtype=dtype))
        for name, dtype in names.items()
    }


def job(rank, world_size, folder):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    init_parallel()
    quick_writer()
    path = f"{folder}/saved"
    os.makedirs(path)
    dist_checkpointing.save(tree(7.0), path, TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    have_strides()

    def load(strict):
        error, loaded = attempt(dist_checkpointing.load, tree(), path, strict=strict)
        if error:
            return f"{error}: {loaded}"
        loaded = loaded[0] if strict.startswith("return_") else loaded
        return {name: set(value.flatten().tolist()) for name, value in loaded.items()}

    def shapes(of):
        error, found = attempt(of, path)
        if error:
            return f"{error}: {found}"
        return {
            name: (tuple(leaf.global_shape), leaf.dtype, leaf.data)
            for name, leaf in found.items()
            if name in SHAPES  # from 0.19 on there is an object of Megatron's own
        }

    for strict in STRICTNESSES:
        yield strict, functools.partial(load, strict)
    yield "tensors", lambda: shapes(dist_checkpointing.load_tensors_metadata)
    yield "all", lambda: shapes(importlib.import_module(SERIALIZATION).load_sharded_metadata)
    yield "diagnoses", diagnoses
    yield "metadata", metadata_that_the_original_gets


SERIALIZATION = "megatron.core.dist_checkpointing.serialization"
MODULE = "megatron.core.dist_checkpointing.strategies.torch"


def metadata_that_the_original_gets():
    """Of properties as old and as new torch has them: whether the metadata are the caller's own, or changed."""
    from megapatch.patches.megatron.strict_loads_with_new_torch import leave_out_strides

    got = leave_out_strides(lambda self, checkpoint_dir, metadata, *args, **kwargs: (metadata, args, kwargs))

    def entry(**properties):
        return SimpleNamespace(size=(2,), properties=SimpleNamespace(dtype=torch.int8, **properties))

    old = SimpleNamespace(state_dict_metadata={"key": entry(), "object": SimpleNamespace()})
    new = SimpleNamespace(state_dict_metadata={"key": entry(strides=(1,)), "old": entry()}, mcore_data="kept")
    same, *others = got(None, "", old, "new argument", also="new")
    changed, *_ = got(None, "", metadata=new)
    return {
        "old": same is old,
        "others": others,
        "new": vars(changed.state_dict_metadata["key"].properties),
        "mcore_data": changed.mcore_data,
        "unchanged entry": changed.state_dict_metadata["old"] is new.state_dict_metadata["old"],
        "caller's": vars(new.state_dict_metadata["key"].properties),
    }


# ------------------------------------------------------------------------------------------ the diagnosis
def passes_the_type(self, checkpoint_dir, metadata=None):
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for key, entry in metadata.state_dict_metadata.items()
    }


def diagnoses():
    from megapatch.patches.megatron.strict_loads_with_new_torch import diagnose

    module = importlib.import_module(MODULE)
    strategy = module.TorchDistLoadShardedStrategy
    return verdicts_of(diagnose, module, made_up(strategy, "load_tensors_metadata", passes_the_type))


DIAGNOSES = {
    "passes_the_type": ("fixed", "does not pass strides on"),
}


# ------------------------------------------------------------------------------------------ the checks
unpatched = cells_of(job, 1, folder="unpatched", env=UNPATCHED)


patched = cells_of(job, 1, folder="patched", env={"MEGAPATCH_ONLY": "megatron.strict-loads-with-new-torch"})


LOADED = {"weights": {7.0}, "halves": {7.0}}
SHAPES = {"weights": ((3, 2), torch.float32, None), "halves": ((3, 2), torch.bfloat16, None)}


@pytest.mark.quick
def test_without_the_patch_only_the_default_loads(unpatched):
    assert unpatched[DEFAULT] == LOADED
    for cell in (*STRICTNESSES[1:], "tensors", "all"):
        assert "TypeError: empty()" in unpatched[cell] and "strides" in unpatched[cell], cell


@pytest.mark.parametrize("strict", STRICTNESSES)
@pytest.mark.quick
def test_every_strictness_loads(patched, strict):
    assert patched[strict] == LOADED


def test_shapes_and_types_are_those_saved(patched):
    assert patched["tensors"] == patched["all"] == SHAPES


def test_metadata_without_strides_are_passed_on_as_they_are(patched):
    found = patched["metadata"]
    assert found["old"]
    assert found["others"] == [("new argument",), {"also": "new"}]


def test_other_loads_keep_their_metadata(patched):
    found = patched["metadata"]
    assert found["new"] == {"dtype": torch.int8}
    assert found["mcore_data"] == "kept"
    assert found["unchanged entry"]
    assert found["caller's"] == {"dtype": torch.int8, "strides": (1,)}


def test_diagnosis(patched):
    assert_verdicts(patched["diagnoses"], DIAGNOSES)
