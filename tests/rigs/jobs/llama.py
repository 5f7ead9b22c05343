"""A tiny Llama: on disk, as Hugging Face has it, and of Megatron's local layers, without Transformer Engine."""

import importlib
from itertools import pairwise

import torch

VOCABULARY = 128
FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
"""Settings of a transformer that a CPU cannot have."""


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


def write_model(folder):
    """Write the weights, too."""
    write_tokenizer(folder)
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def build_local_layers():
    """Let Bridge build models of Megatron's local layers."""
    of_gpt = importlib.import_module("megatron.bridge.models.gpt_provider")
    of_gpt.transformer_engine_layer_spec = of_gpt.local_layer_spec
    attend_to_packed_sequences()


def attend_to_packed_sequences():
    """Let the attention of Megatron's local layers do so."""
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    attention.forward = _packed_or(vars(attention)["forward"])


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
