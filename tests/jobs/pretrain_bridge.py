"""Megatron-Bridge's pretrain() and finetune() on a tiny GPT, once or several times in a process.

pretrain_bridge.py CALL=UNTIL ...: each call trains to that iteration. `pretrain` saves to `ck` in the working
directory, and resumes from it; `finetune` begins with the weights in `ck`, and saves to `ck_tuned`. JOB_FAIL=N has
the loss raise in the process's N-th microbatch; what a call raises is printed, and the next one comes.
"""

import os
import sys
from itertools import count

if os.environ.get("JOB_IMPORT"):
    import megapatch  # noqa: F401 (as docs/megatron.md has it)
if __name__ != "__mp_main__":  # a process that Megatron starts for a save calls nothing of this
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # a wheel brings them compiled, and no Makefile
    import torch
    import torch.distributed
    import torch.nn.functional as F
    from rigs.jobs.bridge import find_bridge

    find_bridge()
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.distributed import DistributedDataParallelConfig

SEQUENCE, STEPS = 32, 5
microbatches = count(1)


def provider():
    return GPTModelProvider(
        transformer_layer_spec=local_layer_spec,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        seq_length=SEQUENCE,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        position_embedding_type="rope",
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,  # it draws of a GPU's random numbers: here of those that loaders of data draw of
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )


def settings(until, **checkpoints):
    evaluation = {"eval_interval": 3, "eval_iters": 2}
    apart = hasattr(config, "ValidationConfig")
    made = config.ConfigContainer(
        model=provider(),
        train=config.TrainingConfig(
            train_iters=until, global_batch_size=8, micro_batch_size=2, **({} if apart else evaluation)
        ),
        optimizer=config.OptimizerConfig(
            optimizer="adam", bf16=True, use_distributed_optimizer=True, clip_grad=1.0, lr=1e-2, min_lr=1e-3
        ),
        scheduler=config.SchedulerConfig(
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=STEPS,
            override_opt_param_scheduler=True,
        ),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
        ),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=SEQUENCE,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(
            ckpt_format="torch_dist", dist_ckpt_optim_fully_reshardable=True, **{"save_interval": 2, **checkpoints}
        ),
        rng=config.RNGConfig(seed=1234),
        **({"validation": config.ValidationConfig(**evaluation)} if apart else {}),
    )
    made.dist.distributed_backend = "gloo"
    return made


def step(state, data_iterator, model, *args, **kwargs):
    if next(microbatches) == int(os.environ.get("JOB_FAIL", 0)):
        raise ConnectionError("a loss that fails")
    return forward_step(state, data_iterator, model, *args, **kwargs)


def main():
    calls = {
        "pretrain": lambda until: pretrain(settings(until, save="ck", load="ck"), step),
        "finetune": lambda until: finetune(
            settings(until, save="ck_tuned", load="ck_tuned", pretrained_checkpoint="ck"), step
        ),
    }
    torch.distributed.init_process_group("gloo")  # so that it stays when a call ends
    for name, until in (call.split("=") for call in sys.argv[1:]):
        try:
            calls[name](int(until))
        except Exception as error:
            print(f"JOB {name} {until}: {type(error).__name__}: {error}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
