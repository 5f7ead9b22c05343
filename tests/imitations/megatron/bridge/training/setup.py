"""An imitation of Bridge's module of this name: the functions that make hooks, of a config and of PEFT."""

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads


def _update_model_config_funcs(model, model_config, ddp_config, optimizer, *, align_grad_reduce=True):
    if isinstance(model[0], DistributedDataParallel) and ddp_config.overlap_grad_reduce:
        assert model_config.no_sync_func is None
    model_config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
    if align_grad_reduce:
        model_config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        model_config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])
    if optimizer is not None:
        model_config.finalize_model_grads_func = finalize_model_grads
        model_config.grad_scale_func = optimizer.scale_loss


def one_or_all(hooks):
    return hooks[0] if len(hooks) == 1 else hooks


def _create_peft_pre_wrap_hook(cfg, state):
    def load_the_base_model(model):
        cfg.checkpoint.finetune = True
        _load_checkpoint_from_path(cfg.checkpoint.pretrained_checkpoint, state, model)
        return model

    return load_the_base_model


def _load_checkpoint_from_path(folder, state, model): ...
