"""python -m rigs.jobs.checkpoints FOLDER OTHER ...: print in JSON what differs in each pair of checkpoints."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

importlib.import_module("megatron.core")  # with the CPU in the place of GPUs; saved objects are of its classes
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402


def load(folder):
    """Return all elements of a checkpoint by path."""
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata.items()
    state = {
        name: torch.full(one.size, 0, dtype=one.properties.dtype)
        if isinstance(one, TensorStorageMetadata)
        else None
        for name, one in known
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    if (common := Path(folder, "common.pt")).exists():  # of older Megatrons
        state["common"] = torch.load(common, weights_only=False)
        if hasattr(state["common"].get("args"), "custom_megatron_init_path"):
            del state["common"]["args"]  # slime's, which say how megapatch is reached
    return dict(leaves(state))


def leaves(value, path=""):
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}/{name}")
    else:
        yield path, value.getvalue() if hasattr(value, "getvalue") else value


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    return bool((one == other) is True or repr(one) == repr(other))


def compare(folder, other):
    first, second = load(folder), load(other)
    found = [f"only in one: {name}" for name in sorted(first.keys() ^ second.keys())]
    return found + [name for name, value in first.items() if name in second and not is_same(value, second[name])]


if __name__ == "__main__":
    folders = sys.argv[1:]
    print(json.dumps([compare(*pair) for pair in zip(folders[::2], folders[1::2], strict=True)]))
