"""The last line of a run of tox: what was tested, what was not for want of a Python, and what more there is.

tox itself ends with a line for each environment, and says that all is well even where only a few were run.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import metadata

from tox.plugin import impl

QUICK = {"lint", "types", "notorch", "quick"}

_run: dict[str, int] = {}


@impl
def tox_after_run_commands(tox_env, exit_code, outcomes):
    _run[tox_env.name] = exit_code


@impl
def tox_add_core_config(core_conf, state):
    if "TOX_PARALLEL_ENV" not in os.environ:  # else the run that started this one says it
        atexit.register(_say, state)


def _say(state):
    if not _run:  # tox list, tox config, or nothing could be set up
        return
    asked = list(state.envs.iter())
    well = not any(_run.get(name, 1) for name in asked)
    lines = []
    if missing := [name for name in asked if name not in _run]:
        lines.append(
            f"NOT TESTED, so this run has failed: {', '.join(missing)}. Most likely their Python is not installed "
            "(see above); put it on PATH, or name it with --discover."
        )
    if failed := [name for name, code in _run.items() if code]:
        lines.append(f"FAILED: {', '.join(failed)}.")
    if well and set(asked) == QUICK:
        python = sys.version_info[:2]
        folder = state.envs["quick"].env_site_package_dir()
        (megatron,) = metadata.distributions(name="megatron-core", path=[str(folder)])
        lines.append(
            f"Tested on Python {python[0]}.{python[1]}: lint, types, the engine without torch, and with "
            f"megatron-core {megatron.version} `megapatch verify` and tests of Megatron's patches. "
            "`tox -m full` adds megatron-core 0.12 to 0.19, SkyRL, verl, ms-swift, AReaL and ROLL, other Pythons, "
            "the build and the docs; CONTRIBUTING.md says what it takes."
        )
    elif well:
        lines.append(f"Tested: {', '.join(_run)}.")
    print("\n".join(lines))
