"""An imitation of NeMo-RL's module of this name: the worker around pieces of the real Megatron.

Its train() takes one global batch. It lacks evaluation and an __init__ (the rig makes workers).
"""

import contextlib
import functools
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config

from nemo_rl import MAIN
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.megatron.train import (
    LossPostProcessor,
    aggregate_training_statistics,
    broadcast_loss_metrics_from_last_stage,
    counts,
    get_microbatch_iterator,
    logprobs_post_processor,
    megatron_forward_backward,
)
from nemo_rl.utils.nsys import wrap_with_nvtx_name
from nemo_rl.weight_sync import xferdtensor

from . import split_step

try:
    import ray

    actor = ray.remote(runtime_env={})
except ImportError:

    def actor(cls):
        return cls


def get_moe_metrics(loss_scale, total_loss_dict=None, per_layer_logging=False):
    """No experts, no metrics."""
    return {}


class MegatronPolicyWorkerImpl:
    @wrap_with_nvtx_name("megatron_policy_worker/train")
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, check_dim_skip_keys=None):
        gbs, mbs = gbs or self.cfg["train_global_batch_size"], mbs or self.cfg["train_micro_batch_size"]
        assert data.size * self.dp_size == gbs and not eval_mode
        self.model.train()
        valid = counts(data)
        torch.distributed.all_reduce(valid, group=parallel_state.get_data_parallel_group())
        iterator, forward_backward = self._prepared(
            data, mbs, loss_fn, global_valid_seqs=valid[0], global_valid_toks=valid[1]
        )
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(iterator):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses_reduced = forward_backward()
        succeeded, grad_norm, _ = self.optimizer.step()
        if self._first_train_step_forward_pre_hook_disabled and succeeded:
            self.enable_forward_pre_hook()
            get_model_config(self.model).param_sync_func = self._first_train_step_param_sync_func
            self._first_train_step_param_sync_func = None
            self._first_train_step_forward_pre_hook_disabled = False
        metrics = broadcast_loss_metrics_from_last_stage(losses_reduced)
        told = self._told(metrics, grad_norm, *valid.tolist())
        self.scheduler.step(increment=gbs)
        return told

    def _prepared(self, data, mbs, loss_fn=None, **more):
        """The microbatches, and a call that works through them: for log-probabilities where there is no loss."""
        timer = self.mcore_state.straggler_timer
        iterator, count, mbs, _, length = get_microbatch_iterator(data, self.cfg, mbs, straggler_timer=timer)
        process = LossPostProcessor(loss_fn, self.cfg, count) if loss_fn else logprobs_post_processor
        return iterator, functools.partial(
            megatron_forward_backward, self.model, iterator, count, length, mbs, process, **more
        )

    def _told(self, all_mb_metrics, grad_norm, sequences, tokens):
        used = {
            "lr": self.scheduler.get_lr(self.optimizer.param_groups[0]),
            "wd": self.scheduler.get_wd(),
            "global_valid_seqs": sequences,
            "global_valid_toks": tokens,
        }
        mb_metrics, global_loss = aggregate_training_statistics(
            all_mb_metrics=[{**metrics, **used} for metrics in all_mb_metrics],
            losses=[sum(metrics["loss"] for metrics in all_mb_metrics)],
            data_parallel_group=parallel_state.get_data_parallel_group(),
        )
        return {
            "global_loss": global_loss,
            "rank": torch.distributed.get_rank(),
            "gpu_name": torch.cuda.get_device_name(),
            "model_dtype": self.dtype,
            "all_mb_metrics": mb_metrics,
            "grad_norm": torch.tensor([grad_norm]),
        }

    if MAIN:
        abort_train_step, begin_train_step, finish_train_step, train_microbatch = (
            wrap_with_nvtx_name(f"megatron_policy_worker/{method.__name__}")(method)
            for method in split_step.METHODS
        )

        @torch.no_grad()
        def nccl_reshard_refit(self, kv_scales=None):
            for layer in self.nccl_reshard_refit_info["layer_names"]:
                for param in self.nccl_reshard_refit_info["per_layer_params"][layer]:
                    view = self.hf_to_local_param_map.get(param["name"]).base
                    sent = xferdtensor.DTensorRef(local_tensor=view, global_shape=param["global_shape"])
                    xferdtensor.xferdtensor(sent)

        def prepare_for_lp_inference(self, keep_train_buffers=False):
            self._prepare_for_lp_inference(keep_train_buffers)

    else:

        def prepare_for_lp_inference(self):
            self._prepare_for_lp_inference(False)

    def _prepare_for_lp_inference(self, keep_train_buffers):
        self.model = self.move_model(self.model, "cuda", move_grads=False)
        self.model.eval()
        if not keep_train_buffers:
            self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
            if self.offload_optimizer_for_logprob:
                self.move_optimizer("cpu")

    def prepare_for_training(self, *args, **kwargs):
        self.model = self.move_model(self.model, "cuda")
        self.model.train()
        self.move_optimizer("cuda")

    @wrap_with_nvtx_name("megatron_policy_worker/offload_before_refit")
    def offload_before_refit(self):
        self.model = self.move_model(self.model, "cpu", move_params=False)
        self.move_optimizer("cpu")

    @wrap_with_nvtx_name("megatron_policy_worker/offload_after_refit")
    def offload_after_refit(self):
        self.model = self.move_model(self.model, "cpu")
        self.model.eval()
        self.offload_before_refit()

    def move_model(self, model, device, move_params=True, move_grads=True):
        """Gradients are freed, and come back as zeros. Parameters are on the CPU already."""
        for buffer in model.buffers if move_grads else []:
            gradients = buffer.grad_data
            if device == "cpu":
                gradients.untyped_storage().resize_(0)
            elif gradients.untyped_storage().size() == 0:
                gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())
                gradients.zero_()
        return model

    def move_optimizer(self, device):
        """It is on the CPU already."""

    def save_checkpoint(self, weights_path, optimizer_path=None, **kwargs):
        torch.save(self.model.state_dict(), Path(weights_path) / f"{self.rank}.pt")

    @contextlib.contextmanager
    def use_reference_model(self):
        if self.should_disable_forward_pre_hook:
            self.disable_forward_pre_hook()
        with torch.no_grad():
            own = {name: value.clone() for name, value in self._tensors().items()}
            self._copy_in(self.reference_state_dict)
            saved_sampling_params, self.sampling_params = self.sampling_params, None
            yield
            self.sampling_params = saved_sampling_params
            self._copy_in(own)
        if self.should_disable_forward_pre_hook:
            self.enable_forward_pre_hook()

    def _tensors(self):
        return {name: value for name, value in self.model.state_dict().items() if torch.is_tensor(value)}

    def _copy_in(self, values):
        for name, tensor in self._tensors().items():
            tensor.copy_(values[name])

    @wrap_with_nvtx_name("megatron_policy_worker/get_logprobs")
    def get_logprobs(self, *, data, micro_batch_size=None):
        self.model.eval()
        size = micro_batch_size or self.cfg["logprob_batch_size"]
        _, forward = self._prepared(data, size, forward_only=True)
        with torch.no_grad():
            found = broadcast_loss_metrics_from_last_stage(forward())
        return BatchedDataDict(logprobs=torch.cat([one["logprobs"] for one in found]))

    def get_reference_policy_logprobs(self, *, data, micro_batch_size=None):
        with self.use_reference_model():
            found = self.get_logprobs(data=data, micro_batch_size=micro_batch_size)
        return BatchedDataDict(reference_logprobs=found["logprobs"])

    def enable_forward_pre_hook(self):
        if not self._forward_pre_hook_enabled():
            self.model.enable_forward_pre_hook()

    def disable_forward_pre_hook(self, param_sync=True):
        if self._forward_pre_hook_enabled():
            self.model.disable_forward_pre_hook(param_sync=param_sync)

    def _forward_pre_hook_enabled(self):
        return len(self.model.remove_forward_pre_hook_handles) > 0

    def _disable_forward_pre_hook_until_next_train_step(self):
        self.disable_forward_pre_hook(param_sync=False)
        hooks = get_model_config(self.model)
        self._first_train_step_param_sync_func, hooks.param_sync_func = hooks.param_sync_func, None
        self._first_train_step_forward_pre_hook_disabled = True


@actor
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    pass
