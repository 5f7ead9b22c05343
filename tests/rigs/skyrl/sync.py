"""SkyRL's own extractors of weights, on a tiny GPT and the real exporter of Megatron-Bridge."""

import asyncio
import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import torch

from rigs.megatron.exporters import find_conversions, new_bridge, tasks_of
from rigs.megatron.gathers import unwrapped
from rigs.releases import import_before_stand_ins
from rigs.skyrl.releases import find_skyrl
from rigs.stand_ins import Anything, StandIns

MEGATRON_WORKER = "workers.megatron.megatron_worker"
BUCKET_GB = 1e-5  # several buckets, even of a tiny GPT


def find_skyrl_and_exporter():
    """Make the release importable, and Bridge's exporter: the setup of a rank."""
    import_before_stand_ins()
    find_skyrl()
    find_conversions()
    # what newer ones import: base classes of theirs, and a compression
    sys.meta_path.append(StandIns(["vllm", "zstandard"], lambda module, name: Anything(name, (), {})))


class Bridge:
    """The part of Bridge's AutoBridge that SkyRL calls; the real one would ask Hugging Face for a model."""

    hf_pretrained = SimpleNamespace()

    def __init__(self):
        self.module = importlib.import_module("megatron.bridge.models.conversion.model_bridge")

    def get_conversion_tasks(self, chunks):
        return tasks_of(self.module, chunks)

    def export_hf_weights(self, chunks, cpu=False, show_progress=True, conversion_tasks=None):
        return new_bridge(self.module).stream_weights_megatron_to_hf(
            chunks,
            self.hf_pretrained,
            cpu=cpu,
            show_progress=show_progress,
            conversion_tasks=conversion_tasks or self.get_conversion_tasks(chunks),
            merge_adapter_weights=False,
        )


def extractors_of(release, chunks):
    """Return what the release reads a model with for a weight sync: by name, functions that return all tensors."""
    for chunk in chunks:  # Bridge's own configurations have it
        unwrapped(chunk).config.share_embeddings_and_output_weights = False
    if release.has("weight_sync/sources"):
        module = importlib.import_module(f"{release.backend}.weight_sync.sources")
        source = module.MegatronWeightSource(Bridge(), chunks, torch.float32)
        return {"source": lambda: _copied(source)}
    worker = importlib.import_module(f"{release.backend}.{MEGATRON_WORKER}")
    if not extracts(release):
        return {"broadcast": lambda: _broadcast(worker, chunks)}
    worker.broadcast_object_across_pp_ranks = lambda value: value  # there is one stage

    def extractor(bucketing):
        made = worker.MegatronWeightExtractor(
            Bridge(),
            chunks,
            enable_bucketing=bucketing,
            bucket_size_threshold_GB=BUCKET_GB,
            training_dtype=torch.float32,
        )

        def read():
            with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
                read = list(made.extract_weights(torch.float32))
            assert len(read) > 1
            return _copied(pair for chunk in read for pair in zip(chunk.names, chunk.tensors, strict=True))

        return read

    return {"extractor": extractor(False), "extractor, in buckets": extractor(True)}


def extracts(release):
    """Whether the release has extractors; older ones read in the middle of the worker's broadcast."""
    return release.has("weight_sync/weight_extractor") or release.has("weight_sync/sources")


def syncs_through_bridge(release):
    return "export_hf_weights" in release.file("workers/megatron/megatron_worker").read_text() or extracts(release)


def _broadcast(module, chunks):
    """Call the broadcast of skyrl-train 0.3.0's own worker, and return what rank 0 sends to the engines."""
    names, tensors = [], []

    async def update_named_weights(request):
        names.extend(request["names"])

    worker = object.__new__(module.MegatronPolicyWorkerBase)
    generator = SimpleNamespace(enable_prefix_caching=False, model_dtype="float32")
    worker.cfg = SimpleNamespace(generator=generator)
    worker.use_cuda_ipc, worker._model_update_group = False, None
    worker.bridge, worker.actor_module = Bridge(), chunks
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.distributed, "broadcast", lambda tensor, *_, **__: tensors.append(tensor.clone())),
    ):
        client = SimpleNamespace(update_named_weights=update_named_weights)
        asyncio.run(worker.broadcast_to_inference_engines(client))
    sent = [dict(zip(names, tensors, strict=True))]
    torch.distributed.broadcast_object_list(sent, 0)
    return sent[0]


def _copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors}
