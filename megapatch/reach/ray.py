"""Into Ray's workers: a hook that Ray runs in each of them, before its first task or actor.

Ray has one such hook for a job (``worker_process_setup_hook``), and a worker that cannot load it dies. So ours
travels by value and asks nothing of a worker but Python: where megapatch cannot be imported, it warns and the
worker lives. A hook that is there already runs after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._reporting.agreement import Facts, difference, numbered
from ..errors import InconsistentError, MegapatchError
from ._ray_trainer import RayTrainer

__all__ = ["RayTrainer", "assert_consistent", "compose_into_init", "runtime_env"]

_HOOK = "worker_process_setup_hook"
_OURS = "_megapatch"  # marks our functions
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # how `ray job submit` tells the driver of the job's runtime environment


def runtime_env(existing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A runtime environment for `ray.init` whose workers activate megapatch; the rest is as in `existing`.

    existing   None, a dictionary or a `ray.runtime_env.RuntimeEnv`; it is not changed

    Its hook (a callable or "module.function") runs after ours, in each worker, and is loaded there as Ray would.
    ``MEGAPATCH_*`` variables of this process are added where it does not set them. Of what this function has
    made it makes the same again.

    In a worker whose environment has no megapatch (or not what megapatch needs) it logs one WARNING. With
    MEGAPATCH_STRICT a StrictError ends the worker, as any exception of a hook does.

    Raises MegapatchError where `existing` or its hook is of no such type.
    """
    if existing is not None and not isinstance(existing, Mapping):
        raise MegapatchError(f"expected a runtime environment (a dictionary or a RuntimeEnv), found {existing!r}")
    env = dict(existing or {})
    hook = env.get(_HOOK)
    if not (hook is None or isinstance(hook, str) or callable(hook)):
        raise MegapatchError(f'{_HOOK}: expected a function or "module.function", found {hook!r}')
    env["env_vars"] = {**_settings(), **(env.get("env_vars") or {})}
    env[_HOOK] = hook if hasattr(hook, _OURS) else _before(hook)
    return env


def compose_into_init() -> None:
    """From now on each `ray.init` of this process passes its runtime environment through `runtime_env`, also the
    one that Ray calls by itself. Call it in the driver, once or more often, before `ray.init`.

    A hook that `ray job submit` gave the job runs after ours, too. In a Ray worker it does nothing.

    Raises MegapatchError when Ray is not installed or `ray.init` has been called; and `ray.init` raises it for a
    ``ray://`` address, where Ray runs no hook.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MegapatchError(f"there is no Ray in this Python: {error}; nothing to compose into") from error
    if hasattr(ray.init, _OURS):
        return
    if ray.is_initialized():
        if ray.get_runtime_context().get_task_id() is not None:
            return  # in a worker, which has been set up by its driver's ray.init
        raise MegapatchError(
            "Ray is initialized, and its workers' environment is settled. Call compose_into_init() before "
            "ray.init() and before the first use of Ray, which calls it, or after ray.shutdown()"
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
    """Raise InconsistentError when one of these Ray actors is patched unlike the others, or not at all.

    Compared is what `megapatch.assert_consistent` compares, in each actor's process. Call it when training is
    about to begin; it waits for what the actors have been told to do before.

    actors   handles; those of different kinds may be compared: what one has not loaded does not count there

    Raises MegapatchError without actors, and what `ray.get` raises for an actor that has died.
    """
    import ray

    if not actors:
        raise MegapatchError("assert_consistent() compares actors: expected their handles, found none")
    look = _looking()
    differing = difference(
        ray.get([actor.__ray_call__.remote(look) for actor in actors]), functools.partial(numbered, "actor")
    )
    if differing is not None:
        raise InconsistentError(f"megapatch is not the same in all actors: {differing}")


def _looking() -> Callable[[object], Facts]:
    # By value, as below. Nothing is imported that is not there: importing megapatch would activate it.
    def look(actor: object) -> Facts:
        import sys

        if "megapatch" not in sys.modules:
            return {"megapatch": ("not imported", sys.executable)}
        from megapatch._reporting.agreement import facts

        return facts()

    return look


def _before(chained: str | Callable[[], object] | None) -> Callable[[], None]:
    # Pickled by value, because it is local to a function; hence no name of this module may occur in it.
    def activate_megapatch() -> None:
        try:
            import megapatch  # noqa: F401
        except ImportError as error:
            import logging
            import sys

            logging.getLogger("megapatch").warning(
                "megapatch cannot be imported by %s (%s): nothing is patched in this Ray worker. Install "
                "megapatch there if it trains.",
                sys.executable,
                error,
            )
        if isinstance(chained, str):
            import importlib

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
    """ray.init's arguments with our runtime environment, for one call.

    Ray merges a job's environment with that of ray.init and refuses what both of them set. So a variable that
    the job sets is left to it, and its hook is chained to ours and, during the call, is not the job's.
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
