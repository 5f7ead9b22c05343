"""Methods of the worker, as on NeMo-RL main, with the faults that patches are there for: finish_train_step leaves
forward pre-hooks off, abort_train_step leaves the rerun state machine as it is."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config

from nemo_rl.algorithms.loss import LossType, MetricNormalizer
from nemo_rl.models.megatron.train import broadcast_loss_metrics_from_last_stage, counts

HOOKS = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")


def begin_train_step(self, loss_fn, gbs=None, mbs=None):
    if getattr(self, "_train_step_state", None) is not None:
        raise RuntimeError("a train step is already open; finish or abort it")
    self.model.train()
    self.model.zero_grad_buffer()
    self.optimizer.zero_grad()
    hooks = get_model_config(self.model)
    self._train_step_state = {
        "loss_fn": loss_fn,
        "gbs": gbs or self.cfg["train_global_batch_size"],
        "mbs": mbs or self.cfg["train_micro_batch_size"],
        "valid": torch.zeros(2),
        "metrics": [],
        "hooks": {name: getattr(hooks, name) for name in HOOKS},
    }
    hooks.no_sync_func, hooks.grad_sync_func = contextlib.nullcontext, None
    hooks.finalize_model_grads_func = None


def train_microbatch(self, data):
    state, one = state_of(self), torch.tensor(1.0)
    state["valid"] += counts(data)
    iterator, forward_backward = self._prepared(
        data, state["mbs"], state["loss_fn"], global_valid_seqs=one, global_valid_toks=one
    )
    machine = get_rerun_state_machine()
    with self.model.no_sync():
        while machine.should_run_forward_backward(iterator):
            losses_reduced = forward_backward()
    state["metrics"] += broadcast_loss_metrics_from_last_stage(losses_reduced)


def finish_train_step(self):
    state = state_of(self)
    torch.distributed.all_reduce(state["valid"], group=parallel_state.get_data_parallel_group())
    sequences, tokens = state["valid"].tolist()
    own = tokens if state["loss_fn"].loss_type is LossType.TOKEN_LEVEL else sequences
    self.model.scale_gradients(1 / own)
    if self.cfg["megatron_cfg"]["distributed_data_parallel_config"]["overlap_grad_reduce"]:
        self.model.start_grad_sync()
    state["hooks"]["finalize_model_grads_func"]([self.model], None)
    _, grad_norm, _ = self.optimizer.step()
    restore_hooks(self)
    kinds = state["loss_fn"].metric_normalizations
    divisors = dict(zip(MetricNormalizer, (tokens, sequences, 1), strict=True))
    metrics = [{name: value / divisors[kinds[name]] for name, value in one.items()} for one in state["metrics"]]
    told = self._told(metrics, grad_norm, sequences, tokens)
    self.scheduler.step(increment=state["gbs"])
    self._train_step_state = None
    return told


def abort_train_step(self):
    if getattr(self, "_train_step_state", None) is not None:
        restore_hooks(self)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._train_step_state = None


def state_of(self):
    state = getattr(self, "_train_step_state", None)
    if state is None:
        raise RuntimeError("no train step open; begin_train_step must be called first")
    return state


def restore_hooks(self):
    vars(get_model_config(self.model)).update(self._train_step_state["hooks"])


METHODS = abort_train_step, begin_train_step, finish_train_step, train_microbatch
