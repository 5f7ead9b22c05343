"""Activate megapatch in Ray's workers, by a hook that Ray runs in each of them before its first task or actor.

Ray has one such hook per job (``worker_process_setup_hook``), and a worker that cannot load it dies. So ours
travels by value and needs nothing in the worker but Python: if megapatch cannot be imported there, the hook warns
and the worker lives. A hook that is already set runs after ours.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._reporting.facts import Facts, difference
from .._reporting.numbers import numbered
from ..errors import InconsistentError, MegapatchError

__all__ = ["assert_consistent", "compose_into_init", "runtime_env"]

_AT_A_TIME = 64
_HOOK = "worker_process_setup_hook"
_OURS = "_megapatch"  # marks our functions
# Holds the job's runtime environment in the driver of `ray job submit`. Private to Ray (tested with 2.51.1, 2.54.0
# and 2.60.0): set in ray/dashboard/modules/job/job_supervisor.py, read and merged in ray/_private/worker.py.
# https://github.com/ray-project/ray/blob/ray-2.51.1/python/ray/_private/worker.py#L1781
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def runtime_env(existing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Make a runtime environment for `ray.init` whose workers activate megapatch.

    A worker without megapatch, or without something that megapatch needs, logs one WARNING. With MEGAPATCH_STRICT
    a StrictError ends the worker, as any exception of a hook does.

    Idempotent: passed its own result, it returns an equal environment.

    Args:
        existing: a dictionary, a `ray.runtime_env.RuntimeEnv` or None; it is not changed. Its hook (a callable or
            "module.function") runs in each worker after ours, and is loaded there as Ray would load it.

    Returns:
        A copy of `existing` with our hook, and with the ``MEGAPATCH_*`` variables of this process in "env_vars",
        except those that `existing` sets.

    Raises:
        MegapatchError: `existing` or its hook has another type.
    """
    if existing is not None and not isinstance(existing, Mapping):
        kind = type(existing).__name__
        raise MegapatchError(
            f"expected a runtime environment (a dictionary or a RuntimeEnv), found an object of type {kind}"
        )
    env = dict(existing or {})
    hook = env.get(_HOOK)
    if not (hook is None or isinstance(hook, str) or callable(hook)):
        raise MegapatchError(
            f'{_HOOK}: expected a function or "module.function", found an object of type {type(hook).__name__}'
        )
    env["env_vars"] = {**_settings(), **(env.get("env_vars") or {})}
    env[_HOOK] = hook if hasattr(hook, _OURS) else _before(hook)
    return env


def compose_into_init() -> None:
    """Pass the runtime environment of each later `ray.init` of this process through `runtime_env`.

    Also of the `ray.init` that Ray calls by itself. Call this in the driver before `ray.init`; further calls do
    nothing, and neither does a call in a Ray worker. A hook that `ray job submit` gave the job runs after ours,
    too.

    From then on `ray.init` raises MegapatchError for a ``ray://`` address, because Ray runs no hook there.

    Raises:
        MegapatchError: Ray is not installed, or `ray.init` has been called.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MegapatchError(f"compose_into_init() needs Ray, which is not installed here: {error}") from error
    if hasattr(ray.init, _OURS):
        return
    if ray.is_initialized():
        if ray.get_runtime_context().get_task_id() is not None:
            return  # in a worker, whose driver has called ray.init
        raise MegapatchError(
            "Ray is initialized, so its workers' environment is fixed. Call compose_into_init() before ray.init() "
            "and before the first use of Ray, which calls it, or after ray.shutdown()"
        )
    plain = ray.init

    @functools.wraps(plain)
    def init(*args: Any, **kwargs: Any) -> Any:
        _refuse_client(*args, **kwargs)
        with _composed(kwargs) as composed:
            return plain(*args, **composed)

    vars(init)[_OURS] = True
    ray.init = init


def assert_consistent(actors: Sequence[Any]) -> None:
    """Raise InconsistentError if one of these Ray actors is patched unlike the others, or not at all.

    Compares the same facts as `megapatch.assert_consistent`, in each actor's process. Call it just before training
    begins; it waits for the actors' earlier calls.

    Args:
        actors: handles. Actors of different kinds can be compared: modules that an actor has not loaded do not
            count there.

    Raises:
        InconsistentError: the message says which actors differ in what.
        MegapatchError: `actors` is empty.
        ray.exceptions.RayActorError: an actor has died.
    """
    import ray

    if not actors:
        raise MegapatchError("assert_consistent() compares actors: expected at least one handle")
    look = _looking()
    # Every actor has __ray_call__, which calls a function with the actor's instance. Undocumented, but Ray uses it
    # itself (tested with 2.51.1, 2.54.0 and 2.60.0).
    # https://github.com/ray-project/ray/blob/ray-2.51.1/python/ray/actor.py#L2389
    looking = {actor.__ray_call__.remote(look): number for number, actor in enumerate(actors)}
    found: dict[str, tuple[Facts, list[int]]] = {}  # actors with the same facts together: there may be thousands
    while looking:
        done, _ = ray.wait(list(looking), num_returns=min(len(looking), _AT_A_TIME))
        for reference in done:
            facts: Facts = ray.get(reference)
            found.setdefault(repr(facts), (facts, []))[1].append(looking.pop(reference))
    alike = sorted(found.values(), key=lambda group: min(group[1]))
    differing = difference(
        [facts for facts, _ in alike],
        lambda positions: numbered("actor", [number for position in positions for number in alike[position][1]]),
    )
    if differing is not None:
        raise InconsistentError(f"megapatch is not the same in all actors: {differing}")


def _looking() -> Callable[[object], Facts]:
    # Pickled by value, as below. It must not import megapatch, which would activate it.
    def look(actor: object) -> Facts:
        import sys

        if "megapatch" not in sys.modules:
            return {"megapatch": ("not imported", sys.executable)}
        from megapatch._reporting import facts

        return facts.look()

    return look


def _before(chained: str | Callable[[], object] | None) -> Callable[[], None]:
    # Pickled by value, because it is local to a function. So it must not use a global name of this module.
    def activate_megapatch() -> None:
        import importlib

        try:
            importlib.import_module("megapatch")
        except ImportError as error:
            import logging
            import sys

            logging.getLogger("megapatch").warning(
                "megapatch cannot be imported by %s (%s): nothing is patched in this Ray worker. Install "
                "megapatch there if it trains. (see https://github.com/megapatch/megapatch/blob/main/docs/"
                "troubleshooting.md#worker-without-megapatch)",
                sys.executable,
                "".join(character if character.isprintable() else " " for character in str(error)),
            )
        if isinstance(chained, str):
            module, _, name = chained.rpartition(".")
            getattr(importlib.import_module(module), name)()
        elif chained is not None:
            chained()

    vars(activate_megapatch)[_OURS] = True
    return activate_megapatch


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("MEGAPATCH_")}


def _refuse_client(address: str | None = None, **others: object) -> None:
    address = address or os.environ.get("RAY_ADDRESS") or ""
    if address.startswith("ray://"):
        raise MegapatchError(
            f"Ray Client ({address}) runs no {_HOOK}, so megapatch would not reach the workers. Run the driver in "
            "the cluster (`ray job submit`), or let a .pth file import megapatch there"
        )


@contextlib.contextmanager
def _composed(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Add our runtime environment to the arguments of one call of ray.init.

    Ray merges the job's environment with that of ray.init, and refuses variables that both set. So those that
    the job sets are left out of ours. The job's hook is chained to ours, and taken from the job during the call.
    """
    own, job_config = kwargs.get("runtime_env"), kwargs.get("job_config")
    job_config_json = os.environ.get(_JOB)
    if job_config_json is None:
        if not own and job_config is not None:
            own = job_config.runtime_env
        yield {**kwargs, "runtime_env": runtime_env(own)}
        return
    job = json.loads(job_config_json)
    theirs = job.get("runtime_env") or {}
    env = runtime_env(own)
    for name in (theirs.get("env_vars") or {}).keys() - ((own or {}).get("env_vars") or {}).keys():
        env["env_vars"].pop(name, None)
    if _HOOK in theirs and not (own or {}).get(_HOOK):
        env[_HOOK] = _before(theirs.pop(_HOOK))
        os.environ[_JOB] = json.dumps({**job, "runtime_env": theirs})
    try:
        yield {**kwargs, "runtime_env": env}
    finally:
        os.environ[_JOB] = job_config_json
