"""The split train step of NeMo-RL's Megatron worker.

It calls the worker module's own functions, so that it normalizes, aggregates and reports as that release's train()
does.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ....errors import MisuseError
from ....train_step import TrainStep
from .._workers import WORKER
from ..forward_pre_hook_after_split import put_hooks_back
from .worker import SplitStep, begin, by_tokens, normalized, sum_over_ranks, valid_counts


def begin_train_step(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    """Open a step: zero the gradients, to which each train_microbatch() adds until finish_train_step().

    Args:
        loss_fn: as for train().
        gbs: samples of the step, over all ranks; by default the worker's setting.
        mbs: samples of a microbatch; by default the worker's setting.

    Raises:
        MisuseError: (a RuntimeError) a step is already open, or a split step cannot normalize the loss.
    """
    if (others := _other_losses(self.model)) and not by_tokens(loss_fn):
        raise MisuseError(
            f"begin_train_step(): the loss is divided by sequences, and the model has {others}, which train() "
            "divides by tokens; the same gradient cannot be divided by both. Use train(), or a loss by tokens"
        )
    if getattr(self.model.config, "mtp_num_layers", None):
        raise MisuseError("begin_train_step(): a split step cannot train multi-token prediction. Use train()")
    if getattr(self, "_router_replay_enabled", False):
        raise MisuseError("begin_train_step(): a split step cannot replay the routing; switch router replay off")
    _forget_inference(self.model)
    step = functools.partial(
        TrainStep,
        self.model,
        self.optimizer,
        self.scheduler,
        calls_add_up=True,  # NeMo-RL undoes Megatron's mean over microbatches
        step_scheduler_on_skip=True,
    )
    begin(MegatronSplitStep, self, loss_fn, gbs, mbs, lambda expected: step(expected_count=expected))


@dataclass
class MegatronSplitStep(SplitStep):
    microbatches: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def train(self, worker: Any, data: Any) -> None:
        nemo = _worker_module(worker)
        sequences, tokens = valid_counts(data)
        self.sequences += sequences
        self.tokens += tokens
        batch_arguments = {**_of_worker(worker), "data": data, "mbs": self.mbs}
        iterator, num_microbatches, micro_batch_size, _, length = nemo.get_microbatch_iterator(
            **_accepted(nemo.get_microbatch_iterator, batch_arguments)
        )
        self.microbatches += int(num_microbatches)
        worker.model.train()  # log-probabilities between the calls are computed in eval mode
        processor = {**_of_worker(worker), "loss_fn": self.loss_fn, "num_microbatches": num_microbatches}
        expected_count = nemo.torch.tensor(self.expected_count, device="cuda")
        arguments = {
            **_of_worker(worker),
            "data_iterator": iterator,
            "num_microbatches": num_microbatches,
            "seq_length": length,
            "mbs": micro_batch_size,
            "post_processing_fn": nemo.LossPostProcessor(**_accepted(nemo.LossPostProcessor, processor)),
            "forward_only": False,
            "global_valid_seqs": expected_count,
            "global_valid_toks": expected_count,
        }
        with self.step.accumulate(num_microbatches, self.count_of(sequences, tokens)):
            machine = nemo.get_rerun_state_machine()
            while machine.should_run_forward_backward(iterator):
                losses = nemo.megatron_forward_backward(**_accepted(nemo.megatron_forward_backward, arguments))
        if worker.cfg["megatron_cfg"]["empty_unused_memory_level"] >= 1:
            nemo.torch.cuda.empty_cache()
        on_last_stage = nemo.parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.metrics += nemo.broadcast_loss_metrics_from_last_stage(
            [dict(metrics) for metrics in losses] if on_last_stage else None
        )

    def finish(self, worker: Any) -> dict[str, Any]:
        nemo = _worker_module(worker)
        data_parallel = nemo.parallel_state.get_data_parallel_group()
        sequences, tokens = sum_over_ranks(data_parallel, self.sequences, self.tokens)
        used = {
            "lr": worker.scheduler.get_lr(worker.optimizer.param_groups[0]),
            "wd": worker.scheduler.get_wd(),
            "global_valid_seqs": sequences,
            "global_valid_toks": tokens,
        }
        grad_norm = self._step(worker, self.count_of(sequences, tokens))
        if worker.cfg["megatron_cfg"]["empty_unused_memory_level"] >= 2:
            nemo.torch.cuda.empty_cache()
        metrics = [
            normalized(
                self.loss_fn, of_microbatch, expected_count=self.expected_count, tokens=tokens, sequences=sequences
            )
            | used
            for of_microbatch in self.metrics
        ]
        all_metrics, loss = nemo.aggregate_training_statistics(
            all_mb_metrics=metrics,
            losses=[sum(float(of_microbatch["loss"]) for of_microbatch in metrics)],
            data_parallel_group=data_parallel,
        )
        result = {
            "global_loss": loss.cpu(),
            "rank": nemo.torch.distributed.get_rank(),
            "gpu_name": nemo.torch.cuda.get_device_name(),
            "model_dtype": worker.dtype,
            "all_mb_metrics": all_metrics,
            "grad_norm": nemo.torch.tensor([grad_norm]),
        }
        return result | self._expert_metrics(worker, nemo)

    def _step(self, worker: Any, count: float) -> float:
        """Step the optimizer and return the gradient's norm. If nothing counts on any rank, parameters stay."""
        if not count:
            self.step.abort()
            worker.scheduler.step(increment=self.gbs)
            return 0.0
        result = self.step.finish(increment=self.gbs)
        if result.succeeded:
            put_hooks_back(worker)
        return result.grad_norm or 0.0

    def _expert_metrics(self, worker: Any, nemo: ModuleType) -> dict[str, Any]:
        if (getattr(worker.model.config, "num_moe_experts", None) or 0) <= 1:
            return {}
        arguments = {
            "loss_scale": 1.0 / max(1, self.microbatches),
            "per_layer_logging": worker.cfg["megatron_cfg"]["moe_per_layer_logging"],
        }
        found = nemo.get_moe_metrics(**arguments)
        return {"moe_metrics": found} if found else {}


# ---------------------------------------------------------------------------- helpers
def _worker_module(worker: Any) -> ModuleType:
    """Return the module whose names train() calls. (train() itself is a decorator's closure of another module.)"""
    (implementation,) = (cls for cls in type(worker).__mro__ if cls.__name__ == WORKER)
    return sys.modules[implementation.__module__]


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes in this release."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _other_losses(model: Any) -> str:
    """Describe the model's own losses, which are in the same gradient; an empty text if it has none."""
    settings = model.config
    found = []
    if getattr(settings, "num_moe_experts", None):
        coefficients = getattr(settings, "moe_aux_loss_coeff", None)
        balanced = any(coefficients) if isinstance(coefficients, (list, tuple)) else coefficients
        if balanced and getattr(settings, "moe_router_load_balancing_type", None) not in ("none", "sinkhorn"):
            found.append("a router's load balancing loss")
        if getattr(settings, "moe_z_loss_coeff", None):
            found.append("a router's z loss")
    return " and ".join(found)


def _forget_inference(model: Any) -> None:
    """Drop the state that inference has left in the model, as train() does first."""
    if hasattr(model, "inference_params"):
        model.inference_params = None
    for module in model.modules():
        if hasattr(module, "reset_inference_cache"):
            module.reset_inference_cache()
        if hasattr(module, "_inference_key_value_memory"):
            module._inference_key_value_memory = None


def _of_worker(worker: Any) -> dict[str, Any]:
    """Return all that a worker's train() passes on, in one release or another."""
    settings = worker.cfg["megatron_cfg"]
    found = {
        "cfg": worker.cfg,
        "model": worker.model,
        "straggler_timer": worker.mcore_state.straggler_timer,
        "enable_hidden_capture": "draft" in worker.cfg and worker.cfg["draft"]["enabled"],
    }
    of_settings = ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs")
    of_worker = (
        "defer_fp32_logits",
        "sampling_params",
        "draft_model",
        "delegate_pack_to_model",
        "delegate_mtp_loss_mask_to_model",
        "model_slices_context_parallel_inputs",
    )
    found |= {name: settings.get(name, False) for name in of_settings}
    return found | {name: getattr(worker, name) for name in of_worker if hasattr(worker, name)}
