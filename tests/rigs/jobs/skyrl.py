"""What SkyRL's Megatron workers need on a CPU, and its trainer in the place of engines and environments."""

import importlib

import torch

from rigs.jobs.edge import draw_rollouts, print_metrics, print_weights
from rigs.jobs.llama import VOCABULARY, build_local_layers

PROMPTS = 12  # four a step


def stand_in():
    build_local_layers()
    sync = importlib.import_module("skyrl_train.weight_sync.broadcast_strategy")
    sync.BroadcastTransferStrategy.create_sender = staticmethod(lambda **ignored: Sender())


class Sender:
    """In the place of a broadcast to engines: prints what it would send."""

    async def send_chunks(self, chunks):
        weights = {}
        for chunk in chunks:
            weights.update(zip(chunk.names, chunk.tensors, strict=True))
        if torch.distributed.get_rank() == 0:
            print_weights(weights)


class Prompts(torch.utils.data.Dataset):
    def __len__(self):
        return PROMPTS

    def __getitem__(self, index):
        prompt = [{"role": "user", "content": "w5"}]
        return {"prompt": prompt, "env_class": None, "env_extras": {}, "uid": str(index)}

    @staticmethod
    def collate_fn(prompts):
        return prompts


class Generator:
    async def generate(self, batch):
        step, size = batch["batch_metadata"].global_step, len(batch["prompts"])
        prompts, answers, rewards = zip(*draw_rollouts(step, size, VOCABULARY), strict=True)
        return {
            "prompt_token_ids": list(prompts),
            "response_ids": list(answers),
            "rewards": list(rewards),
            "loss_masks": [[1] * len(answer) for answer in answers],
            "stop_reasons": ["stop"] * size,
            "rollout_metrics": {},
            "rollout_logprobs": None,
        }


class Engine:
    """It has nothing to prepare."""

    def size(self):
        return 1

    tp_size = pp_size = dp_size = size

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


async def _nothing(*ignored, **also_ignored):
    return None


class Tracker:
    def log(self, data, step, **ignored):
        print_metrics(step, data)

    def finish(self):
        pass
