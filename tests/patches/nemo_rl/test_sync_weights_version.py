"""nemo_rl.sync-weights-version: NeMo-RL's own synchronizers, and its own controller where the checkout has one.

Without a checkout there is our imitation of the interface, and of one transport.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from rigs.megatron import UNPATCHED, Log, attempt
from rigs.nemo_rl import CHECKOUT, IMITATIONS, find_nemo_rl, needs_nemo_rl
from rigs.skyrl import status_of
from rigs.stand_ins import Anything, StandIns

from megapatch import apply, restore
from megapatch.patches.nemo_rl.sync_weights_version import MODULE, diagnose
from megapatch.testing import run_ranks

NAME, PACKAGE = "nemo_rl.sync-weights-version", "nemo_rl.weight_sync"
CONTROLLER = "nemo_rl.algorithms.single_controller"
has_synchronizers = Path(CHECKOUT or IMITATIONS, f"{MODULE.replace('.', '/')}.py").exists()
pytestmark = [
    pytest.mark.skipif(not has_synchronizers, reason="this NeMo-RL has no synchronizers"),
    pytest.mark.thorough,
]


def find():
    find_nemo_rl()
    # What the controller's module imports, and the controller does not use.
    unused = ("aiohttp", "httpx", "nemo_rl.data.datasets", "torchdata")
    sys.meta_path.insert(0, StandIns(unused, lambda module, name: Anything(name, (), {})))


# ------------------------------------------------------------------------------------------ the edge
class Side:
    """A policy, or a generation: keeps in `calls` what is called, and answers as workers do that succeed."""

    def __init__(self, calls, succeeds=True):
        self.cfg, self._calls, self._succeeds = {}, calls, succeeds

    def __getattr__(self, name):
        if name.startswith("_") or name == "set_weight_version":
            raise AttributeError(name)

        def call(*args, **kwargs):
            self._calls.append((name, threading.current_thread() is threading.main_thread()))
            if kwargs.get("kv_scales"):
                self._calls.append(("kv_scales", kwargs["kv_scales"]))
            return [self._succeeds]

        return call

    def get_free_memory_bytes(self):
        return 1 << 30

    def get_collective_sender_spec(self):
        return SimpleNamespace(buffer_size_bytes=1, num_buffers=1, nccl_peer=False)


class Told(Side):
    """A generation that can be told."""

    def set_weight_version(self, version):
        self._calls.append(("set_weight_version", version))


class Broken(Side):
    def set_weight_version(self, version):
        raise OSError("gone")


class Remote(Side):
    """As a Ray actor's handle."""

    def __init__(self, calls):
        super().__init__(calls)
        self.set_weight_version = SimpleNamespace(remote=lambda version: ("reference", version))


TRANSPORTS = {"collective": ("vllm", False)}
if CHECKOUT:
    TRANSPORTS |= {"ipc": ("vllm", True), "http": ("sglang", True)}
CHECKED = TRANSPORTS.keys() - {"http"}
"""Those that look at whether a sync has succeeded."""


def synchronizer(transport="collective", kind=Told, **options):
    """One that NeMo-RL's own factory makes, and the list of what it calls."""
    calls = []
    backend, colocated = TRANSPORTS[transport]
    made = importlib.import_module(f"{PACKAGE}.factory").create_weight_synchronizer(
        Side(calls), kind(calls, **options), backend, colocated, train_cluster=object(), inference_cluster=object()
    )
    # Ray waits for what are results already.
    sys.modules[type(made).__module__].ray = SimpleNamespace(get=lambda results: results)
    return made, calls


def awaited(call):
    """In an event loop, as controllers do."""

    async def run():
        return await call()

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------ without the patch
def without(rank, world_size):
    made, calls = synchronizer()
    found = {
        "status": status_of(NAME),
        "version": attempt(awaited, lambda: made.sync_weights(3)),
        "calls": list(calls),
        "awaited": attempt(awaited, made.sync_weights),
    }
    return found | {"controller": attempt(controller_syncs)}


def controller_syncs():
    """The controller's own _sync_weights, with version 5: what it has called, and whether rollouts may go on."""
    try:
        actor = importlib.import_module(CONTROLLER).SingleControllerActor
    except ModuleNotFoundError as error:
        if error.name != CONTROLLER:
            raise
        return None
    cls = actor.__ray_metadata__.modified_class.__ray_actor_class__
    made, calls = synchronizer()

    async def run():
        controller = object.__new__(cls)
        controller._weight_synchronizer, controller._trainer_version = made, 5
        controller._rollout_permitted = asyncio.Event()
        controller._inflight_rollouts = 0
        controller._gen = SimpleNamespace()
        if not first_controller():
            controller._master_config, controller._async_cfg = None, mock.Mock()
            controller._async_cfg.recompute_kv_cache_after_weight_updates = False
            controller._abort_stale_inflight = mock.AsyncMock(return_value=0)
            controller._rollout_manager = Told(calls)
        with mock.patch.object(sys.modules[CONTROLLER], "should_use_nemo_gym", return_value=False, create=True):
            await controller._sync_weights()
        return controller._rollout_permitted.is_set()

    return asyncio.run(run()), calls


def first_controller():
    """Whether the checkout has the one that passes a version; None without any."""
    file = Path(CHECKOUT or IMITATIONS) / f"{CONTROLLER.replace('.', '/')}.py"
    return "sync_weights(self._trainer_version)" in file.read_text() if file.exists() else None


@pytest.fixture(scope="module")
def unpatched():
    return run_ranks(without, 1, setup=find, env=UNPATCHED)[0]


def test_without_the_patch_a_version_is_a_type_error_twice_over(unpatched):
    error, text = unpatched["version"]
    assert error == "TypeError" and "positional argument" in text
    assert unpatched["calls"] == []
    error, text = unpatched["awaited"]
    assert error == "TypeError" and "await" in text
    assert unpatched["status"] == "disabled"


def test_without_the_patch_the_first_controller_cannot_sync(unpatched):
    error, found = unpatched["controller"]
    if first_controller():
        assert error == "TypeError" and "positional argument" in found
    else:
        assert error is None


# ------------------------------------------------------------------------------------------ with it
def with_it(rank, world_size):
    importlib.import_module(MODULE)
    found = {"status": status_of(NAME), "controller": attempt(controller_syncs)}
    for function in (by_transport, without_version, failures, setters, of_users, classes, verdicts):
        found[function.__name__] = function()
    found["restored"] = restored()
    return found


def by_transport():
    """In a loop by position, and elsewhere by keyword, with the other keywords."""
    found = {}
    for transport in TRANSPORTS:
        made, calls = synchronizer(transport)
        result = awaited(lambda made=made: made.sync_weights(3))
        plain, plain_calls = synchronizer(transport)
        timer = importlib.import_module("nemo_rl.utils.timer").Timer() if CHECKOUT else mock.MagicMock()
        plain_result = plain.sync_weights(version=4, timer=timer)
        expected, expected_calls = synchronizer(transport)
        expected.sync_weights()
        found[transport] = {
            "results": (result, plain_result),
            "timed": list(timer.get_timing_metrics()) if CHECKOUT else list(timer.time.call_args.args),
            "stale": (made.is_stale, plain.is_stale),
            "loop": calls,
            "plain": plain_calls,
            "expected": expected_calls,
        }
    return found


def without_version():
    """As main's controller calls it, in a thread; and what a synchronizer looks like."""
    made, calls = synchronizer()
    own = vars(type(made))["sync_weights"]
    result = awaited(lambda: asyncio.to_thread(made.sync_weights, timer=None, kv_scales={"layer": 1.0}))
    return {
        "result": result,
        "scales": [value for name, value in calls if name == "kv_scales"],
        "told": [name for name, _ in calls if name == "set_weight_version"],
        "plain": made.sync_weights(),
        "signature": inspect.signature(made.sync_weights) == inspect.signature(own.__get__(made)),
        "of the class": type(made).sync_weights is own,
        "names": [made.sync_weights.__name__, made.sync_weights.__doc__ == own.__doc__],
    }


def failures():
    found = {}
    for transport in CHECKED:
        made, calls = synchronizer(transport, succeeds=False)
        outcome = attempt(awaited, lambda made=made: made.sync_weights(3))
        found[transport] = outcome, made.is_stale, [name for name, _ in calls]
    made, calls = synchronizer()
    wrong = {
        "two": lambda: made.sync_weights(3, 4),
        "twice": lambda: made.sync_weights(3, version=4),
        "no number": lambda: made.sync_weights("3"),
        "nothing": lambda: made.sync_weights(None),
    }
    found["wrong"] = {name: attempt(call)[0] for name, call in wrong.items()}
    found["calls"] = list(calls)
    found["other keyword"] = attempt(made.sync_weights, 3, nonsense=True)
    return found


def setters():
    log = Log()
    for _ in range(2):
        made, _ = synchronizer(kind=Side)
        awaited(lambda made=made: made.sync_weights(3))
    broken, _ = synchronizer(kind=Broken)
    outcome = attempt(awaited, lambda: broken.sync_weights(3))
    remote, _ = synchronizer(kind=Remote)
    with mock.patch.dict(sys.modules, ray=mock.Mock()):
        awaited(lambda: remote.sync_weights(3))
        told = sys.modules["ray"].get.call_args.args
    return {"log": list(log.texts), "broken": outcome, "remote": told}


def of_users():
    """Classes of a user's, one made before the patch; some take a version already."""
    base = importlib.import_module(MODULE).WeightSynchronizer
    restore()

    class Users(base):
        is_stale = init_communicator = shutdown = mark_stale = None

        def sync_weights(self, *, timer=None, kv_scales=None):
            return {"seconds": 1.0}

    before = Users()
    apply()

    class Takes(Users):
        def sync_weights(self, version, *, timer=None):
            return ("own", version)

    class Coroutine(Users):
        async def sync_weights(self, version):
            return ("own coroutine", version)

    mocked = Users()
    mocked.sync_weights = users = mock.Mock()
    return {
        "before": (before.sync_weights(3), awaited(lambda: before.sync_weights(3))),
        "takes": Takes().sync_weights(3),
        "coroutine": awaited(lambda: Coroutine().sync_weights(3)),
        "mocked": mocked.sync_weights is users,
    }


def classes():
    """Every transport of this release: its own sync_weights is called, without the version."""
    package = importlib.import_module(PACKAGE)
    found = {}
    for _, name, _ in pkgutil.iter_modules(package.__path__):
        if not name.endswith("_weight_synchronizer"):
            continue
        module = importlib.import_module(f"{PACKAGE}.{name}")
        (cls,) = (
            one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__
        )

        def own(self, *, timer=None, kv_scales=None):
            return type(self).__name__

        with mock.patch.object(cls, "sync_weights", own):
            made = object.__new__(cls)
            made._generation = Told([])
            found[name] = made.sync_weights(3) == cls.__name__ and made._generation._calls
    return found


def verdicts():
    module = importlib.import_module(MODULE)
    found = {"as it is": diagnose(module)}

    def takes(self, version=None, *, timer=None): ...

    async def coroutine(self, *, timer=None): ...

    def other(self): ...

    for made_up in (takes, coroutine, other):
        with mock.patch.object(module.WeightSynchronizer, "sync_weights", made_up):
            found[made_up.__name__] = diagnose(module)
    found["none"] = diagnose(ModuleType("none"))
    return {name: verdict.kind.value for name, verdict in found.items()}


def restored():
    restore()
    base = importlib.import_module(MODULE).WeightSynchronizer
    made, _ = synchronizer()
    return "__getattribute__" in vars(base), attempt(made.sync_weights, 3)[0]


@pytest.fixture(scope="module")
def patched():
    return run_ranks(with_it, 1, setup=find)[0]


def test_the_controller_syncs(patched):
    error, found = patched["controller"]
    assert error is None, found
    if first_controller() is None:
        assert found is None
    else:
        permitted, calls = found
        assert permitted
        assert calls[-1] == ("set_weight_version", 5)
        assert [name for name, _ in calls].count("set_weight_version") == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_synced_and_the_version_is_told(patched, transport):
    found = patched["by_transport"][transport]
    expected = [name for name, _ in found["expected"]]
    assert len(expected) >= 2
    assert found["results"] == (None, None)
    assert found["timed"] == ["prepare_for_generation/transfer_and_update_weights"]
    assert found["stale"] == (False, False)
    for version, where in ((3, "loop"), (4, "plain")):
        *calls, told = found[where]
        assert told == ("set_weight_version", version)
        assert calls == [(name, where == "plain") for name in expected]  # a loop goes on meanwhile


def test_calls_without_a_version_are_what_they_were(patched):
    assert patched["without_version"] == {
        "result": None,
        "scales": [{"layer": 1.0}],
        "told": [],
        "plain": None,
        "signature": True,
        "of the class": True,
        "names": ["sync_weights", True],
    }


def test_after_a_sync_that_failed_nothing_is_told(patched):
    for transport in CHECKED:
        (error, text), stale, calls = patched["failures"][transport]
        assert error == "RuntimeError" and text.startswith("Weight transfer failed")
        assert stale
        assert "set_weight_version" not in calls


def test_other_wrong_calls_still_fail(patched):
    found = patched["failures"]
    assert set(found["wrong"].values()) == {"TypeError"}
    assert found["calls"] == []
    assert found["other keyword"][0] == "TypeError" and "nonsense" in found["other keyword"][1]


def test_setters(patched):
    found = patched["setters"]
    assert len(found["log"]) == 1, found["log"]
    assert "Side has no set_weight_version()" in found["log"][0]
    assert found["broken"] == ("OSError", "gone")
    assert found["remote"] == (("reference", 3),)


def test_synchronizers_of_users(patched):
    assert patched["of_users"] == {
        "before": ({"seconds": 1.0}, {"seconds": 1.0}),
        "takes": ("own", 3),
        "coroutine": ("own coroutine", 3),
        "mocked": True,
    }


@needs_nemo_rl
def test_every_transport(patched):
    assert len(patched["classes"]) >= 3
    for name, told in patched["classes"].items():
        assert told == [("set_weight_version", 3)], name


def test_verdicts(patched):
    assert patched["status"] == "applied"
    assert patched["verdicts"] == {
        "as it is": "needed",
        "takes": "fixed",
        "coroutine": "unknown",
        "other": "unknown",
        "none": "absent",
    }


def test_restore(patched):
    assert patched["restored"] == (False, "TypeError")
