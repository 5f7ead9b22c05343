"""The task of streaming_rl.py, and its processes: two ranks that train, and a sampler that generates."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import forkserver

from megapatch.streaming import StepTrainer

RANKS, VOCAB, TOKENS = 2, 8, 9  # tokens of a sample: a prompt of one token and its continuation
SAMPLES = 8  # per prompt group


def rewards(tokens):
    """Return 1.0 for each token that is odd after an even one or even after an odd one, else 0.0."""
    return [float(before % 2 != token % 2) for before, token in itertools.pairwise(tokens)]


def advantages(samples):
    """Return the samples (tokens, log-probabilities) of a group with a third item: the advantage of each token,
    which is its reward minus the mean reward of the group's tokens in the same place."""
    rewarded = [rewards(tokens) for tokens, _ in samples]
    means = [sum(place) / len(samples) for place in zip(*rewarded, strict=True)]
    relative = [[reward - mean for reward, mean in zip(row, means, strict=True)] for row in rewarded]
    return [(*sample, row) for sample, row in zip(samples, relative, strict=True)]


def mean_reward(groups):
    """Return the mean reward of a token."""
    every = [reward for samples in groups for tokens, *_ in samples for reward in rewards(tokens)]
    return sum(every) / len(every)


class Remote:
    """An object in its own process. A call waits for the result, and raises if the method raised there."""

    def __init__(self, kind, *args):
        self.name, self.turn = f"{kind.__name__}{args}", threading.Lock()
        self.channel, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.channel.send((kind, args))

    def call(self, method, *args):
        with self.turn:
            self.channel.send((method, args))
            result, failure = self.channel.recv()
        if failure:
            raise RuntimeError(f"{self.name}.{method}() failed:\n{failure}")
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join()


def serve(channel):
    """Build an object at once, and answer calls until the main process ends."""
    # Megatron and torch complain that there is no GPU.
    warnings.filterwarnings("ignore", module="megatron")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    served, failure = None, None
    with contextlib.suppress(EOFError, ConnectionError):
        kind, arguments = channel.recv()
        try:
            served = kind(*arguments)
        except Exception:
            failure = traceback.format_exc()
        while True:
            method, arguments = channel.recv()
            try:
                channel.send((None, failure) if failure else (getattr(served, method)(*arguments), None))
            except Exception:
                channel.send((None, traceback.format_exc()))


def start(store, running):
    """Start the processes of a run, to be closed with the exit stack; return its trainer and its sampler."""
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()  # its forks inherit this: Ctrl-C is for the main process, which ends them
    signal.signal(signal.SIGINT, before)
    ranks = [running.enter_context(Remote(Policy, rank, f"{store}-ranks")) for rank in range(RANKS)]
    return Ranks(ranks), running.enter_context(Remote(Sampler, f"{store}-sampler"))


class Ranks:
    """Both ranks as one trainer for the pump. `steps` records the groups of each optimizer step."""

    def __init__(self, ranks):
        self.ranks, self.threads = ranks, ThreadPoolExecutor(len(ranks))
        self.step, self.steps = [], []

    def on_all(self, method, *args):
        """Call a method on all ranks and return their results, once all are done, even if a rank fails."""
        calls = [self.threads.submit(rank.call, method, *args) for rank in self.ranks]
        wait(calls)
        return [call.result() for call in calls]

    def begin_train_step(self):
        self.on_all("begin_train_step")
        self.step = []

    def train_microbatch(self, data):
        self.on_all("train_microbatch", data)
        self.step.append(data)

    def finish_train_step(self):
        result = self.on_all("finish_train_step")[0]
        self.steps.append(self.step)
        return result

    def abort_train_step(self):
        self.on_all("abort_train_step")

    def loss(self, groups):
        return self.on_all("loss", groups)[0]

    def weights(self):
        return self.on_all("weights")[0]


def new_model(rank, world_size, store):
    """Build Megatron's GPT and its optimizer on this rank."""
    import torch

    from megapatch.testing import init_parallel, install_cuda_stubs, tiny_gpt, use_one_gloo_thread

    install_cuda_stubs()
    use_one_gloo_thread()
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
    init_parallel()
    sizes = {"layers": 1, "hidden": 32, "vocab": VOCAB, "seq": TOKENS - 1}
    return tiny_gpt(**sizes, optimizer="adam", lr=2e-3, overlap_grad_reduce=True)


def run_model(model, tokens, **labels):
    import torch

    batch, seq = tokens.shape
    hidden_positions = torch.triu(torch.ones(seq, seq, dtype=torch.bool), 1)[None, None]
    return model(tokens, torch.arange(seq).expand(batch, -1), hidden_positions, **labels)


class Policy(StepTrainer):
    """One of two data-parallel ranks. It trains on every other sample of each prompt group."""

    def __init__(self, rank, store):
        self.rank, self.store = rank, store
        self.reset()

    def reset(self):
        """Go back to the initial weights and a new optimizer."""
        import megapatch

        self.model = new_model(self.rank, RANKS, self.store)
        super().__init__(megapatch.TrainStep(self.model.chunks, self.model.optimizer), self.part)

    def part(self, *groups):
        """Return a schedule's arguments for this rank's share of these groups, one microbatch each."""
        import torch

        shares = (zip(*samples[self.rank :: RANKS], strict=True) for samples in groups)
        return {
            "forward_step_func": policy_gradient,
            "data_iterator": ([torch.tensor(column) for column in share] for share in shares),
            "num_microbatches": len(groups),
            "seq_length": TOKENS - 1,
            "micro_batch_size": SAMPLES // RANKS,
        }

    def train_synchronously(self, steps):
        """Train from the initial weights with only Megatron's schedule and optimizer: one call per step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.reset()
        for groups in steps:
            self.model.zero_grad()
            get_forward_backward_func()(model=self.model.chunks, forward_only=False, **self.part(*groups))
            self.model.optimizer.step()

    def loss(self, groups):
        """Return the loss of these groups with the current weights, averaged over both ranks."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = get_forward_backward_func()(model=self.model.chunks, forward_only=True, **self.part(*groups))
        total = torch.stack([reduced["loss"] for reduced in losses]).mean()
        torch.distributed.all_reduce(total)
        return float(total) / RANKS

    def weights(self):
        return {name: value.numpy() for name, value in self.model.parameters().items()}


def policy_gradient(data, model):
    """Megatron's forward step: a policy gradient, with truncated importance weights for older samples."""
    tokens, sampled_logprobs, advantages = next(data)
    output = run_model(model, tokens[:, :-1], labels=tokens[:, 1:])

    def loss_function(output):
        negative_logprobs = output.float()
        importance = (-negative_logprobs.detach() - sampled_logprobs).exp().clamp(max=2)  # about 1 on-policy
        loss = (negative_logprobs * importance * advantages).mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_function


class Sampler:
    """The generation side: its own copy of the weights, and the version that it was given with them."""

    def __init__(self, store):
        self.model, self.version = new_model(0, 1, store), 0

    def load(self, weights):
        import torch

        for name, parameter in self.model.chunks[0].module.named_parameters():
            parameter.data.copy_(torch.from_numpy(weights[name]))

    def set_weight_version(self, version):
        self.version = version

    def sample(self, prompt, seed):
        """Return the version of the weights, and SAMPLES samples of the prompt: tokens and log-probabilities."""
        import torch

        chance = torch.Generator().manual_seed(seed)
        tokens, logprobs = torch.full((SAMPLES, 1), prompt), []
        with torch.no_grad():
            while tokens.shape[1] < TOKENS:
                logits = run_model(self.model.chunks[0].module, tokens)[:, -1].float()
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=chance)
                tokens = torch.cat([tokens, chosen], 1)
                logprobs.append(logits.log_softmax(-1).gather(1, chosen))
        return self.version, list(zip(tokens.tolist(), torch.cat(logprobs, 1).tolist(), strict=True))
