"""The audit never breaks the functions that it watches: replacements on unexpected objects."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from unittest import mock

import pytest
from rigs.audit import WATCHERS, idle_audit, part_of, patches_of
from rigs.where import needs_torch

from megapatch.audit._audit import Call
from megapatch.audit._calls import Calls
from megapatch.audit._gathered_when_read import GatheredWhenRead
from megapatch.audit._microbatches import Microbatches

REPLACED = [
    pytest.param(number, site.module, name, id=f"{site.module}:{name}")
    for number, watcher in enumerate(WATCHERS)
    for site in watcher.sites
    for name in site.replace
]
COROUTINES = {
    "resume_once",
    "InferenceEngineClient.pause_generation",
    "FullyAsyncRayPPOTrainer.async_sync_policy_weights_to_inference_engines",
}


HOOK = "DistributedDataParallel._make_backward_post_hook"
STREAMS = (
    "MegatronModelBridge.stream_weights_megatron_to_hf",
    "Bridge.export_weights",
    "GPTBridge.export_weights",
    "MegatronPeftBridge.stream_adapter_weights_megatron_to_hf",
    "MegatronQuantizationBridge.stream_weights_megatron_to_hf_quant",
    "MegatronEngine.get_per_tensor_param_shard",
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


class Group:
    params = ()


def as_in_training(kept):
    """Return an audit whose parts look: they do less where nothing trains."""
    watching = idle_audit()
    part_of(watching, GatheredWhenRead).due.add(kept)
    part_of(watching, Calls).interrupted_machines.add(kept)
    for part in watching.parts:
        part.begin_call(Call([Strange()], trains=True))
    return watching


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize(("number", "module", "name"), REPLACED)
def test_the_original_decides(number, module, name, raises):
    kept = Group()
    sites = {site.module: site for site in patches_of(as_in_training(kept))[number].sites}
    make = sites[module].replace[name]

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
        assert found is (None if name == "resume_once" else result) or name in RESULTS
    assert seen == [seen[0]] and seen[0] is arguments[0]


def test_none_of_the_functions_of_megatron_and_torch_that_it_watches_is_lost():
    assert sum(replaced.id.startswith(("megatron.", "torch.")) for replaced in REPLACED) == 53


READ = {
    "forward_step": ("forward_step_func", "data_iterator", "model"),
    "finalize_model_grads": ("model", "num_tokens"),
    "OptimizerParamScheduler.step": ("increment",),
    "model_parallel_cuda_manual_seed": ("seed",),
    "save": ("sharded_state_dict",),
    "TorchDistSaveShardedStrategy.async_save": ("sharded_state_dict",),
    "FullyParallelSaveStrategyWrapper.apply_saving_parallelization": ("sharded_state_dict",),
    "resume_once": ("resume", "error", "attempt"),
}
"""By path, the parameters that the audit reads."""


@pytest.mark.parametrize(("path", "lacking"), [(path, name) for path, names in READ.items() for name in names])
def test_a_function_that_lacks_what_the_audit_reads_is_not_watched(path, lacking):
    def judged(names):
        function = mock.Mock(spec_set=("__signature__",))
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        function.__signature__ = inspect.Signature(parameters)
        return {site.diagnose(mock.Mock(**{path: function})).kind.value for site in sites}

    sites = [site for watcher in WATCHERS for site in watcher.sites if path in site.replace]
    sites = [site for site in sites if site.module != "torch.serialization"]
    assert judged(READ[path]) == {"needed"}
    assert judged([name for name in READ[path] if name != lacking]) == {"unknown"}


OWN = [site for watcher in WATCHERS for site in watcher.sites if site.module.startswith("megapatch.")]


@pytest.mark.parametrize("site", OWN, ids=lambda site: site.module)
def test_what_it_watches_of_megapatch_is_there(site):
    assert site.diagnose(importlib.import_module(site.module)).kind.value == "needed"


@needs_torch
def test_nothing_is_looked_at_while_a_cuda_graph_is_captured(monkeypatch, caplog):
    """A wait of the host would end the capture."""
    import torch

    running, capturing = idle_audit(), [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    part = part_of(running, Microbatches)
    part._times["normalizer"] = times = mock.MagicMock()
    for _ in range(2):
        part.judge()
    times.__int__.assert_not_called()
    assert caplog.text.count("CUDA graph") == 1
    capturing[0] = False
    part.judge()
    assert part._times["normalizer"] == 0  # it has been read, and begins again
