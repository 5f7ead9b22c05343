"""A model with its optimizer on this rank, and the calls that tests make on them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed

from . import _data


class TinyStepResult(NamedTuple):
    """The result of `TinyGPT.train_step`, the same on all ranks.

    Attributes:
        loss: mean over the tokens of the global batch.
        grad_norm: L2 norm of the whole model's gradient, before clipping.
    """

    loss: float
    grad_norm: float


@dataclass
class TinyGPT:
    """A tiny GPT on this rank, as `tiny_gpt` builds it, made of Megatron's own objects.

    Attributes:
        chunks: DistributedDataParallel, one per virtual pipeline stage of this rank.
        optimizer: a MegatronOptimizer.
        config: the TransformerConfig.
        ddp_config: the DistributedDataParallelConfig.
        vocab: size of the vocabulary.
        seq: tokens of a sample.
        align_grad_reduce: whether pipeline stages reduce gradients together.
        align_param_gather: whether pipeline stages gather parameters together.
    """

    chunks: list[Any]
    optimizer: Any
    config: Any
    ddp_config: Any
    vocab: int
    seq: int
    align_grad_reduce: bool = True
    align_param_gather: bool = False

    def set_hooks(self) -> None:
        """Set the hooks of the model config as Megatron's own train() does before its first step."""
        from megatron.core.distributed import finalize_model_grads

        def one_or_all(hooks: list[Any]) -> Any:
            return hooks[0] if len(hooks) == 1 else hooks

        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.ddp_config.overlap_grad_reduce:
            self.config.no_sync_func = one_or_all([chunk.no_sync for chunk in self.chunks])
            if self.align_grad_reduce:
                self.config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if self.ddp_config.overlap_param_gather and self.align_param_gather:
            self.config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in self.chunks])

    def microbatches(
        self, step: int, count: int = 2, *, micro_batch_size: int = 2, seed: int = 0
    ) -> list[torch.Tensor]:
        """Make this rank's microbatches of a step, as `megapatch.testing.microbatches` does.

        Args:
            step: number of the step, from 0 on.
            count: microbatches of this rank.
            micro_batch_size: samples of a microbatch.
            seed: selects other data.

        Returns:
            `count` int64 tensors of shape (micro_batch_size, seq + 1).
        """
        return _data.microbatches(
            step, count, micro_batch_size=micro_batch_size, seq=self.seq, vocab=self.vocab, seed=seed
        )

    def forward_backward(
        self,
        step: int = 0,
        *,
        num_microbatches: int = 2,
        micro_batch_size: int = 2,
        seed: int = 0,
        microbatches: Sequence[torch.Tensor] | None = None,
        data_iterators: Sequence[Iterator[torch.Tensor]] | None = None,
        two_tuple: bool = False,
        masked: bool = False,
        forward_only: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Run forward and backward of several microbatches by Megatron's real schedule.

        Args:
            step: number of the step whose data to use.
            num_microbatches: microbatches of this rank.
            micro_batch_size: samples of a microbatch.
            seed: selects other data.
            microbatches: data instead of that of `step` and `seed`: tensors of shape (micro_batch_size, seq + 1),
                whose number and size replace the two arguments above.
            data_iterators: iterators of such tensors, one per chunk; with these the two arguments count.
            two_tuple: the loss function returns (mean, metrics) instead of (sum, tokens, metrics).
            masked: about a third of the tokens do not count.
            forward_only: run no backward.

        Returns:
            The result of the schedule: the metrics of each microbatch on the last pipeline stage, [] on others. A
            metric "loss" is a tensor [sum, number of tokens].
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if microbatches is None:
            microbatches = self.microbatches(step, num_microbatches, micro_batch_size=micro_batch_size, seed=seed)
        if data_iterators is None:
            num_microbatches, micro_batch_size = len(microbatches), len(microbatches[0])
            data_iterators = [iter(microbatches) for _ in self.chunks]
        metrics: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(_data.forward_step, two_tuple=two_tuple, masked=masked),
            data_iterator=list(data_iterators) if len(self.chunks) > 1 else data_iterators[0],
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=self.seq,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
        return metrics

    def train_step(self, step: int = 0, **options: Any) -> TinyStepResult:
        """Zero gradients, run `forward_backward`, and step the optimizer. A collective: call it on all ranks.

        Args:
            step: number of the step whose data to use.
            **options: passed to `forward_backward`.
        """
        self.zero_grad()
        metrics = self.forward_backward(step, **options)
        _, grad_norm, _ = self.optimizer.step()
        return TinyStepResult(mean_loss(metrics), float(grad_norm))

    def zero_grad(self) -> None:
        """Zero the chunks' gradient buffers, then the optimizer's gradients, as Megatron's train_step() does."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gather_parameters(self) -> None:
        """With overlap_param_gather, gather the last step's values now, as the next forward pass would.

        A collective: call it on all ranks. It does not change later results.
        """
        if self.ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return float32 copies of this rank's parameters (with tensor parallelism its shards) by global name.

        With overlap_param_gather the last step's values may still have to be gathered: see `gather_parameters`.
        """
        return {name: _copy(parameter) for name, parameter in self._named_parameters()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return float32 copies of this rank's main_grad by global name: the gradient that the optimizer sees.

        With fp16 it is multiplied by the loss scale. With the distributed optimizer only this rank's part of each
        buffer is reduced. Frozen parameters have none.
        """
        return {
            name: _copy(parameter.main_grad)
            for name, parameter in self._named_parameters()
            if parameter.requires_grad
        }

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the output layer uses the weights of the embedding."""
        return bool(_gpt_of(self.chunks[0]).share_embeddings_and_output_weights)

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        for chunk in self.chunks:
            model = _gpt_of(chunk)
            for name, parameter in model.named_parameters():
                yield global_name(model, name), parameter


def _gpt_of(chunk: Any) -> Any:
    model = chunk.module
    while not hasattr(model, "decoder"):  # DDP, Float16Module
        model = model.module
    return model


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu().clone()


def mean_loss(metrics: Sequence[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss over the tokens of all ranks' microbatches. A collective: call it on all ranks.

    Args:
        metrics: the result of `TinyGPT.forward_backward` on this rank.

    Returns:
        The mean loss per token, the same number on every rank.
    """
    total = torch.zeros(2, dtype=torch.float64, device="cuda")
    for metric in metrics:
        total += metric["loss"].double()
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


# ---------------------------------------------------------------------------- weights
# The same in every layout: names and values do not depend on how the model is divided.
def global_name(model: Any, name: str) -> str:
    """Return a parameter's name in the whole model.

    Args:
        model: a GPTModel that is one pipeline chunk, and may hold only some of the experts.
        name: the parameter's name there.
    """
    from megatron.core import parallel_state

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        here = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        return f"local_experts.{int(match[1]) + here * parallel_state.get_expert_model_parallel_rank()}."

    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    name = re.sub(r"decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def set_weights(model: Any) -> None:
    """Fill a GPTModel's parameters with values that depend only on their global names.

    A tensor-parallel shard gets its part of the whole parameter's values.
    """
    from megatron.core import parallel_state

    of_layers = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    of_experts = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    for name, parameter in model.named_parameters():
        tp, tp_rank = of_experts if "local_experts" in name else of_layers
        sharded = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if sharded:
            shape[parameter.partition_dim] *= tp
        generator = torch.Generator().manual_seed(zlib.crc32(global_name(model, name).encode()))
        whole = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name and name.endswith("weight"):
            whole += 1.0
        parameter.data.copy_(whole.chunk(tp, parameter.partition_dim)[tp_rank] if sharded else whole)
