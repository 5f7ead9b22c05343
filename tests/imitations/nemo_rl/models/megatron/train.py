"""An imitation of what NeMo-RL's Megatron worker imports from this module and its sisters.

There is no packing of sequences, no tensor or context parallelism; arguments for what is not here are ignored.
"""

import functools
from collections import defaultdict

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func


def get_microbatch_iterator(data, cfg, mbs, straggler_timer, seq_length_key=None):
    """(microbatches, how many, samples of each, length, padded length)"""
    assert data.size % mbs == 0
    length = data["input_ids"].shape[1]
    microbatches = (data.slice(start, start + mbs) for start in range(0, data.size, mbs))
    return microbatches, data.size // mbs, mbs, length, length


def megatron_forward_backward(
    model,
    data_iterator,
    num_microbatches,
    seq_length,
    mbs,
    post_processing_fn,
    forward_only=False,
    defer_fp32_logits=False,
    global_valid_seqs=None,
    global_valid_toks=None,
    sampling_params=None,
    straggler_timer=None,
    draft_model=None,
    enable_hidden_capture=False,
    use_linear_ce_fusion_loss=False,
):
    """Return the results that post_processing_fn made of each microbatch, on the last stage."""

    def forward_step(iterator, model):
        data = next(iterator)
        tokens = data["input_ids"]
        later = torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1)[None, None]
        logits = model(tokens, torch.arange(seq_length).expand_as(tokens), later)
        return logits, post_processing_fn(
            data_dict=data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks
        )

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=mbs,
        forward_only=forward_only,
    )


class LossPostProcessor:
    def __init__(
        self, loss_fn, cfg, num_microbatches=1, cp_normalize=True, sampling_params=None, draft_model=None
    ):
        self.loss_fn, self.num_microbatches = loss_fn, num_microbatches

    def __call__(self, data_dict, packed_seq_params=None, global_valid_seqs=None, global_valid_toks=None):
        return functools.partial(self._loss, data_dict, global_valid_seqs, global_valid_toks)

    def _loss(self, data, sequences, tokens, logits):
        loss, metrics = self.loss_fn(next_token_logprobs(logits, data), data, sequences, tokens)
        return loss * self.num_microbatches, metrics  # Megatron takes the mean over microbatches


def logprobs_post_processor(data_dict, **ignored):
    def logprobs(logits):
        found = next_token_logprobs(logits, data_dict)
        return torch.zeros(()), {"logprobs": torch.nn.functional.pad(found, (1, 0))}

    return logprobs


def next_token_logprobs(logits, data):
    found = logits.float().log_softmax(-1)[:, :-1]
    return found.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)


def counts(data):
    """How many sequences and tokens of these samples count."""
    valid = data["sample_mask"]
    return torch.stack([valid.sum(), (data["token_mask"][:, 1:] * valid[:, None]).sum()])


def broadcast_loss_metrics_from_last_stage(loss_metrics=None):
    told, last = [loss_metrics], parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast_object_list(told, src=last, group=group)
    return told[0]


def aggregate_training_statistics(all_mb_metrics, losses, data_parallel_group):
    """Metrics of this rank, by name a list; the loss, summed over ranks."""
    found = defaultdict(list)
    for metrics in all_mb_metrics:
        for name, value in metrics.items():
            found[name].append(value)
    loss = torch.tensor(losses)
    torch.distributed.all_reduce(loss, group=data_parallel_group)
    return dict(found), loss
