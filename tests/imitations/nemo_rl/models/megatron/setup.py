"""An imitation of the last step of a worker's setup, and of what it has Megatron-Bridge do."""

from megatron.core.distributed import finalize_model_grads


def finalize_megatron_setup(config, megatron_cfg, hf_model_name, worker_sharding_annotations, model, optimizer):
    """Make the hooks on the model's config. (tokenizer, bridge, should_disable_forward_pre_hook, dp_size)"""
    ddp, hooks = megatron_cfg.ddp, megatron_cfg.model
    if ddp.overlap_grad_reduce:
        hooks.no_sync_func = model.no_sync
        if megatron_cfg.dist.align_grad_reduce:
            hooks.grad_sync_func = model.start_grad_sync
    if ddp.overlap_param_gather and ddp.align_param_gather:
        hooks.param_sync_func = model.start_param_sync
    hooks.finalize_model_grads_func = finalize_model_grads
    hooks.grad_scale_func = optimizer.scale_loss
    gathers_ahead = ddp.use_distributed_optimizer and ddp.overlap_param_gather
    return None, None, gathers_ahead, worker_sharding_annotations.get_axis_size("data_parallel")
