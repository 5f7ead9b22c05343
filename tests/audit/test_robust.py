"""What looks on never breaks what it looks at: each site's replacement, on objects without what it expects."""

from __future__ import annotations

import asyncio
import importlib
import inspect

import pytest

from megapatch import audit
from megapatch.audit import _calls, _gathers, _ranks, _tokens

REPLACED = [
    pytest.param(make, name, id=f"{site.module}:{name}")
    for watcher in audit._WATCHERS
    for site in watcher.sites
    for name, make in site.replace.items()
]
COROUTINES = {
    "_resume_once",
    "SyncedWeights._sync_and_stamp",
    "InferenceEngineClient.pause_generation",
    "FullyAsyncRayPPOTrainer.async_sync_policy_weights_to_inference_engines",
}


HOOK = "DistributedDataParallel._make_backward_post_hook"
PUMP = ("SyncedWeights._sync_and_stamp",)
STREAMS = (
    "MegatronModelBridge.stream_weights_megatron_to_hf",
    "Bridge.export_weights",
    "GPTBridge.export_weights",
)
RESULTS = {HOOK: lambda: lambda *unused: None, **dict.fromkeys(STREAMS, lambda: iter(["tensor"]))}


class Strange:
    """Has no attributes, and can be neither hashed nor referred to weakly."""

    __slots__ = ()
    __hash__ = None

    def __bool__(self):
        raise ValueError("neither true nor false")


class Broken(Exception):
    pass


@pytest.fixture(autouse=True)
def _as_in_training():
    """Let the watchers look: they do less where nothing trains."""

    class Group:
        params = ()

    group = Group()
    _gathers._due.add(group)
    machine = Group()
    _calls._interrupted.add(machine)
    _tokens.begin_call(True)
    yield
    _tokens.end_call()
    _gathers._due.discard(group)
    _ranks._seeds.clear()
    audit.clear()


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize(("make", "name"), REPLACED)
def test_the_original_decides(make, name, raises):
    def original(*args, **kwargs):
        seen.append(args[0])
        if raises:
            raise Broken
        return RESULTS.get(name, lambda: result)()

    async def coroutine(*args, **kwargs):
        return original(*args, **kwargs)

    seen, result = [], Strange()
    patched = make(coroutine if name in COROUTINES else original)
    arguments = [Strange() for _ in range(patched.__code__.co_argcount or 3)]

    def call():
        found = patched(*arguments)
        if inspect.iscoroutine(found):
            return asyncio.run(found)
        if inspect.isgenerator(found):
            return next(found)
        return found(Strange()) if name == HOOK else found

    if raises:
        with pytest.raises(Broken):
            call()
    else:
        found = call()
        assert found is (None if name == "_resume_once" or name in PUMP else result) or name in RESULTS
    assert seen == [seen[0]] and seen[0] is arguments[0]


OWN = [site for watcher in audit._WATCHERS for site in watcher.sites if site.module.startswith("megapatch.")]


@pytest.mark.parametrize("site", OWN, ids=lambda site: site.module)
def test_what_it_watches_of_megapatch_is_there(site):
    assert site.diagnose(importlib.import_module(site.module)).kind.value == "needed"
