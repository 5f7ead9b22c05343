"""What verl's Megatron workers need on a CPU, and its trainer in the place of engines and rewards."""

import importlib

import numpy
import torch

from rigs.jobs.edge import draw_rollouts, print_metrics, print_weights
from rigs.jobs.llama import VOCABULARY, build_local_layers

PROMPT, ANSWER = 8, 12  # how long they are with padding


def stand_in(engines):
    """Let the CPU be a device for the Megatron engine, and torch.cpu answer like torch.cuda."""
    engines.EngineRegistry.register("language_model", "megatron", "cpu")(engines.MegatronEngineWithLMHead)
    build_local_layers()
    memory = ("allocated", "reserved")
    for name in ("empty_cache", "mem_get_info", *(f"{of}memory_{kind}" for of in ("", "max_") for kind in memory)):
        vars(torch.cpu).setdefault(name, getattr(torch.cuda, name))


class Engine:
    """In the place of vLLM's adapter."""

    def __init__(self, **ignored):
        pass

    async def update_weights(self, weights, **ignored):
        weights = {name: tensor.clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            print_weights(weights)

    async def resume(self, tags):
        pass

    release = resume


class Rewards:
    """In the place of verl's reward loop: rewards come with the rollouts."""

    reward_loop_workers = ()

    def __init__(self, **ignored):
        pass


class Rollouts:
    """For rollout.agent.agent_loop_manager_class."""

    rollout_replicas = ()

    @classmethod
    def create(cls, **ignored):
        return cls()

    def generate_sequences(self, prompts):
        size = len(prompts)
        tokens = torch.zeros(size, PROMPT + ANSWER, dtype=torch.long)
        mask, scores = torch.zeros_like(tokens), torch.zeros(size, ANSWER)
        drawn = draw_rollouts(prompts.meta_info["global_steps"], size, VOCABULARY)
        for row, (prompt, answer, reward) in enumerate(drawn):
            here = slice(PROMPT - len(prompt), PROMPT + len(answer))
            tokens[row, here], mask[row, here] = torch.tensor(prompt + answer), 1
            scores[row, len(answer) - 1] = reward
        tensors = {
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "response_mask": mask[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "rm_scores": scores,
        }
        return importlib.import_module("verl").DataProto.from_dict(
            tensors,
            non_tensors={"multi_modal_inputs": numpy.array([{} for _ in range(size)], dtype=object)},
            meta_info={"timing": {}},
        )


class Tracking:
    def __init__(self, **ignored):
        pass

    def log(self, data, step):
        print_metrics(step, data)
