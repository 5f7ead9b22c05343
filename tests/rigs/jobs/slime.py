"""What slime's train.py needs on a CPU: a model of local layers, rollouts on disk, and an engine."""

import importlib
import random
from argparse import Namespace

import torch
import torch.distributed

from rigs.jobs.edge import print_weights
from rigs.jobs.llama import VOCABULARY, attend_to_packed_sequences


class Engine:
    """In the place of SGLang's: it generates nothing, and prints sums of the weights that it has when it would."""

    def __init__(self, *ignored, **also_ignored):
        self.weights = {}

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        of = importlib.import_module("slime.utils.distributed_utils")
        address = f"tcp://{master_address}:{master_port}"
        self.group = of.init_process_group("gloo", address, None, world_size, rank_offset, group_name=group_name)

    def update_weights_from_distributed(self, names, dtypes, shapes, weight_version, **ignored):
        self.version = weight_version
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            self.weights[name] = torch.empty(shape, dtype=dtype)
            torch.distributed.broadcast(self.weights[name], 0, group=self.group)

    def continue_generation(self):
        print_weights(self.weights, f"weights {self.version}")

    def _get_current_node_ip_and_free_port(self, start_port=1, consecutive=1):
        return "127.0.0.1", start_port

    def _nothing(self, *args, **kwargs):
        pass

    init = pause_generation = flush_cache = release_memory_occupation = resume_memory_occupation = _nothing


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    """For --custom-model-provider-path: slime's own model, of Megatron's local layers."""
    attend_to_packed_sequences()
    args = importlib.import_module("megatron.training").get_args()
    own = importlib.import_module("slime.backends.megatron_utils.model_provider")
    provide = own.get_model_provider_func(Namespace(**{**vars(args), "custom_model_provider_path": None}))
    return provide(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def write_rollouts(folder, number):
    """Write prompts, and what slime saves with --save-debug-rollout-data: each has 4 groups of 2 samples."""
    draw = random.Random(7)
    folder.mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "w5 w6", "label": "w7"}\n' * 16)
    for rollout in range(number):
        samples = [_sample(draw, rollout, index) for index in range(8)]
        torch.save({"rollout_id": rollout, "samples": samples}, folder / f"{rollout}.pt")


def _sample(draw, rollout, index):
    length = draw.randrange(4, 20)
    tokens = [draw.randrange(4, VOCABULARY) for _ in range(5 + length)]
    return {
        "group_index": 4 * rollout + index // 2,
        "index": 8 * rollout + index,
        "rollout_id": 8 * rollout + index,
        "prompt": "",
        "response": "",
        "tokens": tokens,
        "response_length": length,
        "label": "",
        "reward": sum(token < 60 for token in tokens[5:]) / length,
        "status": "completed",
    }
