"""nemo_rl.sync-weights-version: which classes take a version with it.

NeMo-RL's own, of every transport, and its users'. Without a checkout of it there is our imitation.
"""

import importlib
import inspect
import pkgutil
from types import ModuleType
from unittest import mock

import pytest
from rigs.megatron.options import attempt
from rigs.nemo_rl.weight_sync import NAME, PACKAGE, Told, awaited, find, needs_synchronizers, synchronizer
from rigs.nemo_rl.worker import needs_nemo_rl
from rigs.releases import status_of

from megapatch import apply, restore
from megapatch.patches.nemo_rl.sync_weights_version import MODULE, diagnose
from megapatch.testing import run_ranks

pytestmark = [needs_synchronizers, pytest.mark.thorough]


def with_it(rank, world_size):
    importlib.import_module(MODULE)
    found = {"status": status_of(NAME)}
    for function in (of_users, classes, verdicts, restored):
        found[function.__name__] = function()
    return found


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
        "none": "unknown",
    }


def test_restore(patched):
    assert patched["restored"] == (False, "TypeError")
