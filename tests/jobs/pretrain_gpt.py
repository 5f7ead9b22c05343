"""Megatron's pretrain_gpt.py for wheels, which lack it: its main, with a GPT of Megatron's own layers."""

import inspect
import os
from functools import partial

if os.environ.get("JOB_IMPORT"):
    import megapatch  # noqa: F401 (as docs/megatron.md has it)
if __name__ != "__mp_main__":  # a process that Megatron starts for a save calls nothing of this
    import torch
    from megatron.core.datasets import utils
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args, get_tokenizer, pretrain
    from megatron.training.arguments import core_transformer_config_from_args


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        )
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_func(loss_mask, output):
    """As in pretrain_gpt.py: sum and tokens, checked by the rerun machine."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    get_rerun_state_machine().validate_result(
        result=loss, rejection_func=torch.isnan, message="found NaN in the loss", tolerance=0.0, fatal=True
    )
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    batch = next(data_iterator) if data_iterator is not None else None
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="969,30,1",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, train_val_test_num_samples, lambda: True, config).build()


def main():
    utils.compile_helpers = lambda: None  # a wheel brings them compiled, and no Makefile
    datasets_provider.is_distributed = True
    provided = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:  # from 0.18 on
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        provided["cfg_container"] = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(**provided)


if __name__ == "__main__":
    main()
