"""What runs in the other processes of streaming_rl.py: two ranks that train, and one that samples."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import traceback
import warnings

from megapatch.streaming import StepTrainer

RANKS, VOCAB, TOKENS = 2, 8, 9  # a prompt of one token, and what follows it
SAMPLES = 8  # of a prompt group


class Remote:
    """An object in a process of its own. A call waits for its result, and raises what was raised there."""

    def __init__(self, kind, *args):
        self.name, self.turn = f"{kind.__name__}{args}", threading.Lock()
        self.channel, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.Process(target=serve, args=(theirs, kind, *args), daemon=True).start()
        theirs.close()

    def call(self, method, *args):
        with self.turn:
            self.channel.send((method, args))
            result, failure = self.channel.recv()
        if failure:
            raise RuntimeError(f"{self.name}.{method}() failed:\n{failure}")
        return result


def serve(channel, kind, *args):
    served = None
    warnings.filterwarnings("ignore", module="megatron")  # of what it would rather have than a CPU
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, arguments = channel.recv()
            try:
                served = served or kind(*args)
                channel.send((getattr(served, method)(*arguments), None))
            except Exception:
                channel.send((None, traceback.format_exc()))


def new_model(rank, world_size, store):
    """Megatron's GPT with its optimizer, on this rank."""
    import torch

    from megapatch.testing import init_parallel, install_cuda_stubs, tiny_gpt

    install_cuda_stubs()
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
    init_parallel()
    sizes = {"layers": 1, "hidden": 32, "vocab": VOCAB, "seq": TOKENS - 1}
    return tiny_gpt(**sizes, optimizer="adam", lr=5e-3, overlap_grad_reduce=True)


def run_model(model, tokens, **labels):
    import torch

    batch, seq = tokens.shape
    hidden_positions = torch.triu(torch.ones(seq, seq, dtype=torch.bool), 1)[None, None]
    return model(tokens, torch.arange(seq).expand(batch, -1), hidden_positions, **labels)


class Policy(StepTrainer):
    """One of two data parallel ranks: of each prompt group it has every other sample."""

    def __init__(self, rank, store):
        self.rank, self.store = rank, store
        self.start_anew()

    def start_anew(self):
        import megapatch

        self.model = new_model(self.rank, RANKS, self.store)
        super().__init__(megapatch.TrainStep(self.model.chunks, self.model.optimizer), self.part)

    def part(self, *groups):
        """The arguments of a schedule for these groups, a microbatch each."""
        import torch

        batches = [
            (torch.tensor(tokens[self.rank :: RANKS]), torch.tensor(advantages[self.rank :: RANKS]))
            for tokens, advantages in groups
        ]
        return {
            "forward_step_func": policy_gradient,
            "data_iterator": iter(batches),
            "num_microbatches": len(groups),
            "seq_length": TOKENS - 1,
            "micro_batch_size": SAMPLES // RANKS,
        }

    def train_synchronously(self, steps):
        """By Megatron's schedule and optimizer alone."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.start_anew()
        for groups in steps:
            self.model.zero_grad()
            get_forward_backward_func()(model=self.model.chunks, forward_only=False, **self.part(*groups))
            self.model.optimizer.step()

    def loss(self, groups):
        """Of these groups, with the weights as they are now: the mean over both ranks."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = get_forward_backward_func()(model=self.model.chunks, forward_only=True, **self.part(*groups))
        total = torch.stack([one["loss"] for one in losses]).mean()
        torch.distributed.all_reduce(total)
        return float(total) / RANKS

    def weights(self):
        return {name: value.numpy() for name, value in self.model.parameters().items()}


def policy_gradient(data, model):
    """Megatron's forward step: each token's log-probability, times how much better than its group it was."""
    tokens, advantages = next(data)
    output = run_model(model, tokens[:, :-1], labels=tokens[:, 1:])

    def loss_function(output):
        loss = (output.float() * advantages).mean()
        return loss, {"loss": loss.detach()}

    return output, loss_function


class Sampler:
    """Generation: it has its own copy of the weights, and the version that it was told."""

    def __init__(self, store):
        self.model = new_model(0, 1, store)

    def load(self, weights):
        import torch

        for name, parameter in self.model.chunks[0].module.named_parameters():
            parameter.data.copy_(torch.from_numpy(weights[name]))

    def set_weight_version(self, version):
        self.version = version

    def sample(self, prompt, seed):
        """(version, SAMPLES continuations of the prompt)"""
        import torch

        chance = torch.Generator().manual_seed(seed)
        tokens = torch.full((SAMPLES, 1), prompt)
        with torch.no_grad():
            while tokens.shape[1] < TOKENS:
                logits = run_model(self.model.chunks[0].module, tokens)[:, -1].float()
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=chance)], 1)
        return self.version, tokens.tolist()
