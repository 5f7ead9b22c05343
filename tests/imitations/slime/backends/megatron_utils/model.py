"""An imitation of slime's module of this name: the same functions around the same pieces of the real Megatron.

The test rig puts in here, as into the real module: get_args, get_batch, loss_function, clear_memory,
save_checkpoint, load_checkpoint, setup_model_and_optimizer and logging_utils.log.
"""

import functools
import math
from types import SimpleNamespace

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

get_args = get_batch = loss_function = save_checkpoint = load_checkpoint = setup_model_and_optimizer = None
logging_utils = SimpleNamespace(log=None)


def clear_memory():
    pass


def enable_forward_pre_hook(model_chunks):
    for chunk in model_chunks:
        assert isinstance(chunk, DDP)
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model_chunks, param_sync=True):
    for chunk in model_chunks:
        assert isinstance(chunk, DDP)
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def should_disable_forward_pre_hook(args):
    return args.use_distributed_optimizer and args.overlap_param_gather


def forward_step(args, num_microbatches, global_batch_size, data_iterator, model):
    batch = get_batch(data_iterator, ["tokens"], args.data_pad_size_multiplier, args.allgather_cp)
    output = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
        loss_mask=batch["full_loss_masks"],
    )
    return output, functools.partial(loss_function, args, batch, num_microbatches, global_batch_size)


def train_one_step(
    args,
    rollout_id,
    step_id,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    num_microbatches,
    step_global_batch_size,
):
    release_grads(model, optimizer)
    microbatches = get_forward_backward_func()(
        forward_step_func=functools.partial(forward_step, args, num_microbatches, step_global_batch_size),
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    valid, grad_norm = True, math.nan
    if not args.check_for_nan_in_loss_and_grad:
        valid = not optimizer.prepare_grads()
        if valid:
            grad_norm = optimizer.get_grad_norm()
            valid = math.isfinite(grad_norm)
    if valid:
        successful, grad_norm, _ = optimizer.step()
        assert successful
        opt_param_scheduler.step(increment=step_global_batch_size)
    release_grads(model, optimizer)
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}, grad_norm
    values = torch.stack([each["values"] for each in microbatches]).sum(0)
    torch.distributed.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {"loss": values[1].item() / step_global_batch_size}, grad_norm


def release_grads(model, optimizer):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def one_or_all(hooks):
    return hooks[0] if len(hooks) == 1 else hooks


def train(rollout_id, model, optimizer, opt_param_scheduler, data_iterator, num_microbatches, global_batch_sizes):
    args = get_args()
    assert len(num_microbatches) == len(global_batch_sizes)
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.train()

    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if isinstance(model[0], DDP) and args.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])
    config.finalize_model_grads_func = finalize_model_grads

    hooked = False
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
        param_sync_func, config.param_sync_func = config.param_sync_func, None

    for step, (count, size) in enumerate(zip(num_microbatches, global_batch_sizes, strict=True)):
        parts = data_iterator, model, optimizer, opt_param_scheduler
        losses, grad_norm = train_one_step(args, rollout_id, step, *parts, count, size)
        if step == 0 and should_disable_forward_pre_hook(args):
            enable_forward_pre_hook(model)
            config.param_sync_func = param_sync_func
            hooked = True
        if mpu.get_data_parallel_rank() == 0 and mpu.is_pipeline_last_stage(ignore_virtual=True):
            metrics = {f"train/{name}": value for name, value in losses.items()}
            number = rollout_id * len(num_microbatches) + step
            metrics |= {"train/grad_norm": grad_norm, "train/step": number}
            logging_utils.log(args, metrics, step_key="train/step")

    if hooked:
        disable_forward_pre_hook(model)


def save(iteration, model, optimizer, opt_param_scheduler):
    args = get_args()
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model)
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far=0,
        checkpointing_context=None,
        train_data_iterator=None,
        preprocess_common_state_dict_fn=None,
    )
    if should_disable_forward_pre_hook(args):
        enable_forward_pre_hook(model)


def initialize_model_and_optimizer(args, role="actor"):
    """As in v0.2.2 and v0.2.3."""
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    clear_memory()
    iteration, _ = load_checkpoint(model, optimizer, opt_param_scheduler, checkpointing_context={})
    clear_memory()
    opt_param_scheduler.step(increment=iteration * args.global_batch_size)
    return model, optimizer, opt_param_scheduler, iteration
