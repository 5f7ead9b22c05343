"""An imitation of NeMo-RL's module of this name: the worker around a model that FSDP2 has sharded.

Its train() takes one global batch. It lacks evaluation, attention (so that samples of a bin need no packing), and
an __init__ (the rig makes workers).
"""

import contextlib
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.megatron.train import counts, next_token_logprobs
from nemo_rl.utils.nsys import wrap_with_nvtx_name

from .megatron_policy_worker import actor


def get_cpu_state_dict(tensors, pin_memory=False):
    return {name: torch.empty_like(_local(one), pin_memory=pin_memory).copy_(_local(one)) for name, one in tensors}


def _norm_of(gradients):
    return torch.linalg.vector_norm(torch.stack([one.norm().full_tensor() for one in gradients]))


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DTensorPolicyWorkerImpl:
    @wrap_with_nvtx_name("dtensor_policy_worker/train")
    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        gbs, mbs = gbs or self.cfg["train_global_batch_size"], mbs or self.cfg["train_micro_batch_size"]
        size = torch.tensor(data.size)
        torch.distributed.all_reduce(size, group=self.dp_mesh.get_group())
        assert size == gbs and not eval_mode
        assert len({values.shape[1] for values in data.values() if values.dim() > 1}) == 1
        self.model.train()
        batch = data.get_batch(batch_idx=0, batch_size=gbs // self.dp_size)
        valid = counts(batch)
        torch.distributed.all_reduce(valid, group=self.dp_mesh.get_group())
        sequences, tokens = valid

        self.optimizer.zero_grad()
        losses, all_mb_metrics = [], defaultdict(list)
        for one in self._microbatches(batch, mbs):
            loss, metrics = loss_fn(
                next_token_logprobs=self._logprobs(one),
                data=one,
                global_valid_seqs=sequences,
                global_valid_toks=tokens,
            )
            loss = loss * (self.dp_size * self.cp_size)  # of FSDP2's mean over ranks the sum
            loss.backward()
            if metrics["num_valid_samples"] > 0:
                losses.append(loss.item())
                metrics["lr"] = self.optimizer.param_groups[0]["lr"]
                metrics["global_valid_seqs"], metrics["global_valid_toks"] = valid.tolist()
                for name, value in metrics.items():
                    all_mb_metrics[name].append(value)

        parameters = [one for one in self.model.parameters() if one.grad is not None]
        grad_norm = torch.zeros(())
        if parameters:
            grad_norm = _norm_of([one.grad for one in parameters])
        if self.max_grad_norm is not None:
            for one in parameters:  # one by one: those that are tensor parallel have a mesh of their own
                clip_grads_with_norm_([one], self.max_grad_norm, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        global_loss = torch.tensor([sum(losses)])
        torch.distributed.all_reduce(global_loss, group=self.dp_mesh.get_group())
        return {
            "global_loss": global_loss,
            "grad_norm": grad_norm.reshape(1),
            "rank": torch.distributed.get_rank(),
            "gpu_name": torch.cuda.get_device_name(),
            "model_dtype": self.dtype,
            "all_mb_metrics": dict(all_mb_metrics),
        }

    @wrap_with_nvtx_name("dtensor_policy_worker/get_logprobs")
    def get_logprobs(self, data, micro_batch_size=None):
        self.model.eval()
        with torch.no_grad():
            found = self._logprobs(data)
        return BatchedDataDict(logprobs=torch.nn.functional.pad(found, (1, 0)))

    @contextlib.contextmanager
    def use_reference_model(self):
        with torch.no_grad():
            own = get_cpu_state_dict(self.model.state_dict().items(), pin_memory=True)
            self._copy_in(self.reference_model_state_dict)
            saved_sampling_params, self.sampling_params = self.sampling_params, None
            yield
            self.sampling_params = saved_sampling_params
            self._copy_in(own)

    def _copy_in(self, values):
        for name, tensor in self.model.state_dict().items():
            _local(tensor).copy_(values[name])

    def prepare_for_lp_inference(self):
        self.model.eval()

    def save_checkpoint(self, weights_path, optimizer_path=None, **kwargs):
        torch.save(self.model.state_dict(), Path(weights_path) / f"{self.rank}.pt")

    def _microbatches(self, batch, size):
        if self.cfg["dynamic_batching"]["enabled"] or self.enable_seq_packing:
            (bins,) = batch.micro_batch_indices
        else:
            assert batch.size % size == 0
            bins = [(start, start + size) for start in range(0, batch.size, size)]
        return [batch.slice(start, end) for start, end in bins]

    def _logprobs(self, data):
        """Of each token after the first. Gradients flow through this rank's part of the sequence."""
        length = data["input_ids"].shape[1]
        positions = torch.arange(length)
        logits = self.model(
            input_ids=data["input_ids"], position_ids=positions.repeat(data.size, 1), use_cache=False
        ).logits
        own = positions * self.cp_size // length == self.cp_mesh.get_local_rank()
        return next_token_logprobs(torch.where(own[:, None], logits, logits.detach()), data)


@actor
class DTensorPolicyWorker(DTensorPolicyWorkerImpl):
    pass
