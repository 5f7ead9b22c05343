"""Stand-ins that streaming_skyrl.py needs for GPUs, for a checkpoint and of inference engines."""

from types import SimpleNamespace

import torch
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper, megatron_worker

from megapatch.testing import init_parallel, tiny_gpt, use_one_gloo_thread

VOCABULARY, LENGTH = 16, 8


async def nothing(*_, **__): ...


ENGINES = SimpleNamespace(
    pause_generation=nothing, resume_generation=nothing, increment_weight_version=lambda: None
)


class Worker(megatron_worker.MegatronPolicyWorkerBase):
    """SkyRL's worker, with a tiny GPT and gloo."""

    enable_router_replay = enable_sample_support_replay = empty_cuda_cache = False

    def init_worker_process_group(self):
        use_one_gloo_thread()
        torch.distributed.init_process_group("gloo")
        super().init_worker_process_group()

    def init_model(self):
        init_parallel()
        gpt = tiny_gpt(vocab=VOCABULARY, seq=LENGTH, hooks=False, lr=1.0)
        self.actor_module, self.optimizer = gpt.chunks, gpt.optimizer
        self.scheduler = SimpleNamespace(step=lambda increment: None)
        wrapper = megatron_model_wrapper.MegatronModelWrapper
        self.model = wrapper(self.cfg, gpt.chunks, gpt.optimizer, self.policy_loss_fn)

    async def broadcast_to_inference_engines(self, engines, *settings, **options): ...
