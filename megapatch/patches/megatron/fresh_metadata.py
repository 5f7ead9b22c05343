"""A checkpoint is read with its own metadata, not with those of a checkpoint that was in its folder before.

Symptom   with --ckpt-assume-constant-structure, a checkpoint that was overwritten in the same folder is read with
          the metadata of the one before, silently: tensors get each other's values where the order of the keys has
          changed or a key was added ({a: 11, b: 12} loads as {a: 12, b: 11}). Where sizes differ the load fails:
          "Global shape mismatch for loaded ... and expected ...", or an UnpicklingError.
Upstream  NVIDIA/Megatron-LM#3326, from 0.17 on and on main: the metadata are kept by path, for the whole process.
          nvidia-resiliency-ext has a class of the same name, with the same defect, from 0.6 on.
          Unpatched, Megatron forgets them only when an asynchronous worker is reset.
Seam      the class attribute CachedMetadataFileSystemReader.read_metadata, in Megatron and in
          nvidia-resiliency-ext. Before it, metadata kept of another file than the one that is there now (path,
          inode, size, time of modification in nanoseconds) are forgotten, and the original reads again. An
          unchanged file is still read only once.
          With cache_metadata=False, all of Megatron's readers share the metadata that one of them has read,
          whatever its folder; these are forgotten at each read.
Limits    a file that cannot be opened by its path (a storage that is not a file system) is read again each time.
          A load during which the checkpoint is overwritten fails, or mixes the two, as without the flag.
Numbers   change where an old file would have been read: to those of the checkpoint that is there.
Cost      with the flag an open and an fstat for each read, of which a load has two; without it none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, reads_in_order, unmet

MEGATRON = "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader"
READER = "CachedMetadataFileSystemReader"
CACHE = "_metadata_cache"
"""The class attribute that all readers share: metadata by path."""
KEY = "_cache_key"
OWN = "_cached_metadata"
"""In other versions, the attribute of each reader."""
FILE = ".metadata"
"""The name that torch gives the file (torch.distributed.checkpoint.filesystem, 2.6 to 2.15)."""
STATUS = ("stat", "fstat", "lstat", "getmtime")
"""Functions by which one sees that a file is another one."""


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: it keeps metadata by path, or asks for the file's status first."""
    reader: Any = getattr(module, READER, None)
    read, initialize = f"{module.__name__}:{READER}.read_metadata", f"{module.__name__}:{READER}.__init__"
    if not hasattr(reader, CACHE) and not unmet.names(read, OWN):
        return Verdict(ABSENT, "in this version each reader keeps only what it has read itself")
    missing = [*unmet.attributes(f"{module.__name__}:{READER}", CACHE), *unmet.names(initialize, KEY)]
    expect_none(*missing, *unmet.names(read, KEY, CACHE))
    if reads_in_order(reader.read_metadata, *STATUS):
        return Verdict(FIXED, "read_metadata() looks at the file")
    return Verdict(NEEDED, "metadata are kept by path, and the file is not looked at again")


def forget_other_files(read_metadata: Callable[..., Any]) -> Callable[..., Any]:
    read_from: dict[str, tuple[Any, ...]] = {}  # by key: the file of which the metadata are kept

    @functools.wraps(read_metadata)
    def patched_read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = getattr(self, KEY)
        if key is None:
            getattr(self, CACHE).pop(None, None)
            return read_metadata(self, *args, **kwargs)
        now = _file_of(self)
        if now is None or now != read_from.get(key):
            getattr(self, CACHE).pop(key, None)
            read_from.pop(key, None)
        metadata = read_metadata(self, *args, **kwargs)
        if now is not None:
            # If the file was replaced after it was looked at, the next read finds another one, and reads again.
            read_from[key] = now
        return metadata

    return patched_read_metadata


def _file_of(reader: Any) -> tuple[Any, ...] | None:
    """Return a key that changes when the file is replaced; None where it cannot be opened."""
    try:
        path = os.path.join(reader.path, FILE)
        # Opened, not only asked for its status: NFS answers that from a cache of up to a minute.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, TypeError, ValueError):
        return None
    return path, status.st_ino, status.st_size, status.st_mtime_ns


PATCH = Patch(
    name="megatron.fresh-metadata",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3326",
    changes_numbers=True,
    sites=tuple(
        Site(module, diagnose, replace={f"{READER}.read_metadata": forget_other_files})
        for module in (MEGATRON, NVRX)
    ),
)
