"""megapatch verify in a Ray cluster: one process beside each actor, with the actor's environment and GPUs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import MegapatchError


def verify(actors: Sequence[Any], *names: str, timeout: float = 180.0) -> dict[str, Any]:
    """Run `megapatch verify` with one rank beside each of these Ray actors, and return its results.

    Each rank is a new process on the actor's machine, with the actor's Python, environment variables and visible
    GPUs. The actors do nothing else meanwhile; they keep their memory, and a rank takes at most 2 GiB of GPU
    memory in addition. Over NCCL each actor needs a GPU of its own.

    Args:
        actors: handles, at least one; they become the ranks, in this order.
        *names: of patches and checks, or globs; none for all.
        timeout: seconds for each run of a check, of which it has two.

    Returns:
        The output of `megapatch verify --json`; its "exit_code" is 0 when all is well.

    Raises:
        MegapatchError: `actors` is empty, or nothing could be verified there; the message says why.
        ray.exceptions.RayActorError: an actor has died.
    """
    import ray

    if not actors:
        raise MegapatchError("verify() runs beside actors: expected at least one handle")
    # As assert_consistent(): see there for __ray_call__.
    place, launch = _place(), _launch()
    address, port, _ = ray.get(actors[0].__ray_call__.remote(place))
    nodes = [node for _, _, node in ray.get([actor.__ray_call__.remote(place) for actor in actors])]
    there: Counter[str] = Counter()
    started = []
    for rank, (actor, node) in enumerate(zip(actors, nodes, strict=True)):
        ranks = {"RANK": rank, "LOCAL_RANK": there[node], "WORLD_SIZE": len(actors)}
        env = {**ranks, "MASTER_ADDR": address, "MASTER_PORT": port}
        there[node] += 1
        environment = {name: str(value) for name, value in env.items()}
        started.append(actor.__ray_call__.remote(launch, environment, (*names, "--timeout", str(timeout))))
    (code, printed, errors), *_ = ray.get(started)
    try:
        found: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise MegapatchError(
            f"megapatch verify ended with exit code {code} beside the first actor:\n{errors.strip()}"
        ) from None
    return found


def _place() -> Callable[[object], tuple[str, int, str]]:
    # Pickled by value, because it is local to a function; importing megapatch would activate it in the actor.
    def place(actor: object) -> tuple[str, int, str]:
        """Return this machine's address, a port that is free there, and the node's name."""
        import socket

        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return ray.util.get_node_ip_address(), port, ray.get_runtime_context().get_node_id()

    return place


def _launch() -> Callable[..., tuple[int, str, str]]:
    def launch(actor: object, environment: dict[str, str], arguments: Sequence[str]) -> tuple[int, str, str]:
        import os
        import subprocess
        import sys

        known = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        # The working directory and what the actor's Python has on its path are part of its environment, too.
        known["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-m", "megapatch", "verify", "--json", *arguments],
            env={**known, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return launch
