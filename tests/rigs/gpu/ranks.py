"""The jobs of the checks for GPUs; on CPU the CUDA stubs stand for the device."""

import contextlib
import warnings
from functools import partial

import torch

import megapatch
from megapatch._verify.operations import Operations
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.weight_sync import gathered_parameters
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import BOTH, GRADS

MEAN = partial(forward_step, two_tuple=True)


def on_gpu():
    return torch.cuda.is_available()  # never with the stubs


class Waits:
    """Counts where the host waits for the device: torch says so on a GPU; on CPU where one would."""

    def __init__(self):
        self.count = 0

    @contextlib.contextmanager
    def counted(self):
        if not on_gpu():
            with Operations() as operations:
                yield self
            self.count = len(operations.waits)
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield self
            finally:
                torch.cuda.set_sync_debug_mode(before)
        self.count = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def waits_of_a_step(rank, world_size):
    """Return where the host waits in an ordinary step, without patches and with them."""
    init_parallel()
    found = []
    for switch in (megapatch.restore, megapatch.apply):
        switch()
        model = tiny_gpt(**BOTH)
        model.train_step(0)
        with Waits().counted() as waits:
            model.train_step(1)
        found.append(waits.count)
    return found


def gathers_of_reads(rank, world_size):
    """Return the gathers that two steps take, and that they take with the parameters read in between."""
    init_parallel()
    found = []
    for reading in (False, True):
        model = tiny_gpt(**BOTH)
        model.train_step(0)
        with Collectives().counted() as collectives:
            if reading:
                gathered_parameters(model.chunks)
            model.train_step(1)
        found.append(collectives.gathers)
    return found


def memory(rank, world_size):
    """Return the bytes at the peak of a step of one call, of a split one, and what gathered_parameters() adds."""
    init_parallel()
    peaks = []
    for split in (False, True):
        model = tiny_gpt(**BOTH)
        step = megapatch.TrainStep(model.chunks, model.optimizer)
        for number in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            split_step(model, step, number, (2, 2)) if split else model.train_step(number, num_microbatches=4)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gathered_parameters(model.chunks)
    return peaks[2], peaks[-1], torch.cuda.max_memory_allocated() - before


def split_step(model, step, number, cut, last=False, around_last=None):
    """Make a step of several calls, the last of them within a context manager."""
    batches = iter(model.microbatches(number, sum(cut)))
    with step:
        for index, size in enumerate(cut, start=1):
            is_last = index == len(cut)
            with around_last if around_last and is_last else contextlib.nullcontext():
                step.forward_backward(
                    forward_step_func=MEAN,
                    data_iterator=iter([next(batches) for _ in range(size)]),
                    num_microbatches=size,
                    last=last and is_last,
                    seq_length=model.seq,
                    micro_batch_size=2,
                )
                torch.cuda.synchronize()
        step.finish()


def traced(rank, world_size, last):
    """Return (name, start, end) in microseconds of what ran in a split step's last call, known as such or not."""
    from torch.profiler import ProfilerActivity, profile

    init_parallel()
    model = tiny_gpt(**GRADS)
    step = megapatch.TrainStep(model.chunks, model.optimizer)
    for number in range(2):
        split_step(model, step, number, (1, 1), last)
    seen = profile(activities=[ProfilerActivity.CUDA if on_gpu() else ProfilerActivity.CPU])
    split_step(model, step, 2, (1, 1), last, around_last=seen)
    return [(event.name, event.time_range.start, event.time_range.end) for event in seen.events()]


def graph_and_eager(rank, world_size):
    """Return the losses of a forward pass that was captured with patches in place, and of the same without."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(use_cudagraphable_rng=True)  # dropout sets and sets back a random state
    init_parallel()
    model, inputs = _forward_inputs()
    with torch.no_grad():
        eager = model(*inputs[:3], labels=inputs[3]).clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(*inputs[:3], labels=inputs[3])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(*inputs[:3], labels=inputs[3])
        graph.replay()
    return eager.cpu(), captured.cpu()


def compiled_and_eager(rank, world_size):
    """Return the losses of a compiled forward pass with patches in place, and of the same without compiling.

    Without attention, whose dropout forks Megatron's random state: torch 2.11 to 2.13 waits for its own lock for
    ever (torch.cuda._lazy_call) when it compiles that.
    """
    init_parallel()
    model, inputs = _forward_inputs(attention=False)
    with torch.no_grad():
        eager = model(*inputs[:3], labels=inputs[3])
        compiled = torch.compile(model, backend="eager")(*inputs[:3], labels=inputs[3])
    return eager.cpu(), compiled.cpu()


def _forward_inputs(**options):
    built = tiny_gpt(**options)
    (tokens,) = built.microbatches(0, 1)
    tokens = tokens.cuda()
    mask = torch.triu(torch.ones(built.seq, built.seq, dtype=torch.bool, device="cuda"), 1)[None, None]
    positions = torch.arange(built.seq, device="cuda").expand(len(tokens), -1)
    return built.chunks[0].module, (tokens[:, :-1], positions, mask, tokens[:, 1:])
