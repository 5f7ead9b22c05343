"""What slime's train.py needs on a CPU: a model whose attention takes packed sequences, which Megatron leaves to
Transformer Engine, rollouts on disk, and an engine that takes weights."""

import importlib
import random
from argparse import Namespace
from itertools import pairwise

import torch
import torch.distributed

VOCABULARY = 128


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
        sums = [round(weight.double().abs().sum().item(), 6) for _, weight in sorted(self.weights.items())]
        print(f"JOB weights {self.version}: {sums}", flush=True)

    def _get_current_node_ip_and_free_port(self, start_port=1, consecutive=1):
        return "127.0.0.1", start_port

    def _nothing(self, *args, **kwargs):
        pass

    init = pause_generation = flush_cache = release_memory_occupation = resume_memory_occupation = _nothing


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    """For --custom-model-provider-path: slime's own model, of Megatron's local layers."""
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    attention.forward = _packed_or(vars(attention)["forward"])
    args = importlib.import_module("megatron.training").get_args()
    own = importlib.import_module("slime.backends.megatron_utils.model_provider")
    provide = own.get_model_provider_func(Namespace(**{**vars(args), "custom_model_provider_path": None}))
    return provide(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def _packed_or(forward):
    def packed_forward(self, query, key, value, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is None:
            return forward(self, query, key, value, *args, **kwargs)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        found = [_attend(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(ends)]
        return torch.cat(found).flatten(1)

    return packed_forward


def _attend(query, key, value):
    heads = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


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


def write_tokenizer(folder):
    """Write the configuration and the tokenizer of a tiny Llama, as on Hugging Face."""
    transformers, tokenizers = importlib.import_module("transformers"), importlib.import_module("tokenizers")
    transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=VOCABULARY,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="w0", pad_token="w1", eos_token="w2"
    ).save_pretrained(folder)
