"""megatron.fresh-metadata: checkpoints that are overwritten in their folder, by the real readers at 2 ranks."""

import functools
import importlib
import os
import shutil
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED, attempt, quick_writer
from rigs.megatron.save import minor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from megapatch._python.finding import find_module
from megapatch._python.layers import MARK
from megapatch.patches.megatron.fresh_metadata import MEGATRON, NVRX, diagnose
from megapatch.testing import init_parallel

MODULES = {"megatron": MEGATRON, "nvrx": NVRX}

needs_shared_cache = pytest.mark.skipif(
    minor() < 17, reason="up to 0.16 each reader keeps what it has read itself"
)

# What is saved first, and then in its place: sizes and values of tensors, by key.
CHANGES = {
    "order": ({"a": (4, 1.0), "b": (4, 2.0)}, {"b": (4, 12.0), "a": (4, 11.0)}),
    "added": ({"b": (4, 2.0)}, {"a": (4, 21.0), "b": (4, 22.0)}),
    "wider": ({"a": (4, 1.0)}, {"a": (6, 31.0)}),
}


# ------------------------------------------------------------------------------------------ by Megatron's load
def save_and_load(rank, path, content):
    """Save in `path`, in place of what is there, and load; return the values of each key, or the error's text."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    def tree(loading):
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.full((size,), -1.0 if loading else value), (0, rank, 2)
            )
            for key, (size, value) in content.items()
        }

    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    torch.distributed.barrier()
    dist_checkpointing.save(tree(loading=False), path)
    torch.distributed.barrier()
    strategy = TorchDistLoadShardedStrategy(cache_metadata=True)
    error, loaded = attempt(dist_checkpointing.load, tree(loading=True), path, strategy)
    return f"{error}: {loaded}" if error else {key: sorted(set(value.tolist())) for key, value in loaded.items()}


def change(rank, path, before, after):
    assert save_and_load(rank, path, before) == expected(before)
    return save_and_load(rank, path, after)


def expected(content):
    return {key: [value] for key, (_, value) in content.items()}


# ------------------------------------------------------------------------------------------ by a reader
class Folders:
    """Checkpoints of one rank, read by the readers of one module."""

    def __init__(self, module, folder, rank):
        self.reader = importlib.import_module(MODULES[module]).CachedMetadataFileSystemReader
        self.folder = f"{folder}/{module}-{rank}"

    def write(self, name, *keys):
        state = {key: torch.ones(2) for key in keys}
        checkpoint.save(state, checkpoint_id=f"{self.folder}/{name}", no_dist=True)

    def read(self, name, **kwargs):
        """Return the keys that a new reader finds, or the error's name."""
        error, metadata = attempt(self.reader(f"{self.folder}/{name}", **kwargs).read_metadata)
        return error or sorted(metadata.state_dict_metadata)

    def overwritten(self):
        self.write("one", "a")
        before = self.read("one")
        self.write("one", "b")
        return before, self.read("one")

    def in_place(self):
        """Of the same size, in the same file; the clock has ticked."""
        self.write("place", "a")
        self.write("other", "b")
        before = self.read("place")
        path = f"{self.folder}/place/.metadata"
        with open(f"{self.folder}/other/.metadata", "rb") as other, open(path, "r+b") as file:
            file.write(other.read())
            file.truncate()
        later = os.stat(path).st_mtime_ns + 1
        os.utime(path, ns=(later, later))
        return before, self.read("place")

    def deleted(self):
        self.write("two", "a")
        before = self.read("two")
        shutil.rmtree(f"{self.folder}/two")
        return before, self.read("two")

    def uncached(self):
        self.write("three", "a")
        self.write("four", "b")
        return self.read("three", cache_metadata=False), self.read("four", cache_metadata=False)

    def reset(self):
        """A reader that is sent to another folder."""
        self.write("five", "a")
        self.write("six", "b")
        reader = self.reader(f"{self.folder}/five")
        before = sorted(reader.read_metadata().state_dict_metadata)
        reader.reset(f"{self.folder}/six")
        return before, sorted(reader.read_metadata().state_dict_metadata)

    def often(self):
        """Return how often the file is read by each of three readers with a cache, and of two without."""
        self.write("seven", "a")
        counted = []
        for kwargs in ({}, {}, {}, {"cache_metadata": False}, {"cache_metadata": False}):
            with mock.patch.object(FileSystemReader, "read_metadata", autospec=True) as read:
                read.side_effect = FILE_READ
                self.read("seven", **kwargs)
            counted.append(read.call_count)
        return counted

    def unreachable(self):
        """Where the file cannot be looked at, it is read each time."""
        self.write("eight", "a")
        counted = []
        for _ in range(2):
            read_file = mock.patch.object(FileSystemReader, "read_metadata", autospec=True)
            with mock.patch("os.fstat", side_effect=OSError), read_file as read:
                self.reader(f"{self.folder}/eight").read_metadata()
            counted.append(read.call_count)
        return counted


FILE_READ = FileSystemReader.read_metadata
READINGS = ("overwritten", "in_place", "deleted", "uncached", "reset", "often", "unreachable")


def installed():
    return [name for name, module in MODULES.items() if find_module(module)]


def job(rank, world_size, folder):
    init_parallel()
    quick_writer()
    for name, (before, after) in CHANGES.items():
        yield name, functools.partial(change, rank, f"{folder}/{name}", before, after)
    for module in installed():
        folders = Folders(module, folder, rank)
        yield (module, "marked"), lambda folders=folders: hasattr(folders.reader.read_metadata, MARK)
        for name in READINGS:
            yield (module, name), getattr(folders, name)
        yield (module, "diagnoses"), functools.partial(diagnoses, folders.reader)


# ------------------------------------------------------------------------------------------ the diagnosis
def looks_at_the_file(self):
    if os.stat(self.path) != type(self)._metadata_cache.get(self._cache_key):
        type(self)._metadata_cache[self._cache_key] = super(type(self), self).read_metadata()


def diagnoses(reader):
    module = importlib.import_module(reader.__module__)
    return verdicts_of(diagnose, module, made_up(reader, "read_metadata", looks_at_the_file))


DIAGNOSES = {
    "looks_at_the_file": ("fixed", "looks at the file"),
}


# ------------------------------------------------------------------------------------------ the checks
unpatched = cells_of(job, 2, folder="unpatched", env=UNPATCHED)
patched = cells_of(job, 2, folder="patched")


@needs_shared_cache
@pytest.mark.quick
def test_without_the_patch_values_change_places_or_the_load_fails(unpatched):
    for found in unpatched:
        assert found["order"] == {"a": [12.0], "b": [11.0]}
        assert "Global shape mismatch for loaded (torch.Size([8])) and expected ((12,))" in found["wider"]
    assert any(found["added"] != expected(CHANGES["added"][1]) for found in unpatched)


@needs_shared_cache
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.quick
def test_a_checkpoint_is_read_with_its_own_metadata(patched, name):
    for found in patched:
        assert found[name] == expected(CHANGES[name][1])


needs_reader = pytest.mark.parametrize(
    "module",
    [
        pytest.param("megatron", marks=needs_shared_cache),
        pytest.param(
            "nvrx",
            marks=pytest.mark.skipif("nvrx" not in installed(), reason="nvidia-resiliency-ext is not installed"),
        ),
    ],
)


@needs_reader
def test_without_the_patch_a_reader_goes_by_the_path(unpatched, module):
    for found in unpatched:
        assert not found[module, "marked"]
        for name in ("overwritten", "in_place", "deleted", "reset"):
            assert found[module, name] == (["a"], ["a"]), name
        assert found[module, "often"][:3] == [1, 0, 0]
        assert found[module, "unreachable"] == [1, 0]
    if module == "megatron":
        assert found[module, "uncached"] == (["a"], ["a"])


@needs_reader
def test_a_reader_goes_by_the_file(patched, module):
    for found in patched:
        assert found[module, "marked"]
        for name in ("overwritten", "in_place", "uncached", "reset"):
            assert found[module, name] == (["a"], ["b"]), name
        assert found[module, "deleted"] == (["a"], "FileNotFoundError")
        assert found[module, "unreachable"] == [1, 1]


@needs_reader
def test_an_unchanged_file_is_read_once(patched, module):
    for found in patched:
        assert found[module, "often"] == [1, 0, 0, 1, 1]


@needs_reader
def test_diagnosis(patched, module):
    assert_verdicts(patched[0][module, "diagnoses"], DIAGNOSES)
