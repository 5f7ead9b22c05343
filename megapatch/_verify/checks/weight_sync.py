"""Weight syncs with a real inference engine, vLLM or SGLang, in a process of its own, where it is installed.

`megapatch.weight_sync.paused_generation` pauses it with requests in flight, and resumes it also where the sync
raises half way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..._python.finding import find_module
from ..._versions import version_of
from ..check import DP, CannotRunHere, Check, Layout, expect
from . import _syncs
from ._syncs import LONG, RECORD, STARTED, Interrupted

ASKED = {
    "vllm": {
        "vllm": ("", "vLLM is not installed"),
        "vllm.v1.engine.async_llm": ("PauseMode", "this vLLM is too old: it has no modes of pausing"),
        "vllm.v1.worker.gpu_model_runner": ("weights_path", "this vLLM is too old: it cannot load from a folder"),
    },
    "sglang": {
        "sglang": ("", "SGLang is not installed"),
        "sglang.srt.managers.io_struct": ('"retract"', "this SGLang is too old: a pause ends all requests"),
    },
}
"""Modules of each engine, what their source has to have, and what it means when that is missing."""
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""Environment variables, or how they begin, that are for the ranks: an engine would take them for its own."""


def weight_syncs(package: str, layout: Layout = DP) -> None:
    """Make weight syncs beside the first rank; the others wait. The ranks' time limit ends the engine as well."""
    for module, (name, reason) in ASKED[package].items():
        spec = find_module(module)
        if spec is None or (name and name not in Path(str(spec.origin)).read_text()):
            raise CannotRunHere(reason)
    import torch.distributed

    if torch.distributed.get_rank() == 0:
        with tempfile.TemporaryDirectory(prefix="megapatch-engine-") as folder:
            assert_syncs(_found(package, Path(folder)))


def assert_syncs(found: dict[str, Any]) -> None:
    """Raise DefectSeen unless all is as it should be.

    Args:
        found: by the engine's process: "new", the answers of the engine as it started with the new weights; "old",
            those after it loaded others; "syncs", from these to the new ones. None stands for an answer that did
            not come.
    """
    expect(None not in [*found["old"], *found["new"]], "before any sync a request was not answered")
    expect(found["old"] != found["new"], "the old and the new weights give the same tokens: nothing can be seen")
    expect(found["syncs"], "no sync was made")
    for sync in found["syncs"]:
        kind = "a sync that raises half way" if sync["fails"] else "a sync"
        what = f"{kind} (pause_generation(mode='{sync['mode']}'))"
        raised = Interrupted.__name__ if sync["fails"] else ""
        expect(sync["raised"] == raised, f"{what} raised {sync['raised'] or 'nothing'}")
        expect(sync["paused"] is True, f"{what}: generation was not paused")
        in_flight = all(0 < tokens < LONG for tokens in sync["at_pause"])
        expect(in_flight, f"{what}: requests were not in flight, with {sync['at_pause']} of {LONG} tokens")
        expect(sync["after_load"] == sync["at_pause"], f"{what}: tokens were made in the pause")
        lost = sync["in_flight"].count(None)
        expect(not lost, f"{what}: {lost} of {len(sync['in_flight'])} requests in flight never ended")
        endings = [(len(tokens), reason) for tokens, reason in sync["in_flight"]]
        ended = [(LONG, "length")] * len(endings)
        if sync["mode"] == "abort":
            ended = [(tokens, "abort") for tokens in sync["at_pause"]]
        expect(endings == ended, f"{what}: requests in flight ended with {endings} instead of {ended}")
        expect(None not in sync["answers"], f"{what}: requests after it are not answered")
        mixed = not sync["fails"] and sync["answers"] != found["new"]
        expect(not mixed, f"{what}: tokens after it are not those of an engine that started with the new weights")


def _found(package: str, folder: Path) -> dict[str, Any]:
    """Run the engine's process, which may write nothing outside of this folder, and download nothing."""
    from ...testing._server import SAFE_PATH  # here there is torch

    environment = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"), "1")
    caches = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_CACHE_DIR", "SGLANG_CACHE_DIR")
    environment |= dict.fromkeys(caches, str(folder / "cache"))
    output = folder / "output"
    with output.open("w") as file:
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.path = [*filter(None, sys.path)]; "  # without the working directory
                f"from {_syncs.__name__} import main; main({str(folder)!r}, '{package}')",
            ],
            env=environment | SAFE_PATH,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        why = f"exit code {ended.returncode}: {_last_error(output.read_text(errors='replace'))}"
        if (folder / STARTED).exists():
            raise RuntimeError(f"the engine's process ended with {why}")
        raise CannotRunHere(f"the engine of {package} {version_of(package, package)} does not start: {why}")
    found: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return found


def _last_error(output: str) -> str:
    """Return the last line that names an error, or the last one: an engine may have said more as it ended."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"(\(.*\) )?[\w.]*(Error|Exception): ", line)]
    return (errors or lines)[-1]


CHECKS = tuple(Check(f"weight-sync-{package}", partial(weight_syncs, package), audited=False) for package in ASKED)
