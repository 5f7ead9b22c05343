"""What frameworks' jobs have in the place of engines and trackers: drawn rollouts, and lines of what they get."""

import hashlib
import random
import re
import sys

import torch

NOT_TRAINED = re.compile(r"tim(e|ing)|tok|mem|sec|gpu|perf")


def draw_rollouts(step, size, vocabulary):
    """Return prompts, answers and rewards, the same ones for a step in each process."""
    draw = random.Random(500 + step)

    def tokens(least, most):
        return [draw.randrange(4, vocabulary) for _ in range(draw.randint(least, most))]

    return [(tokens(2, 8), tokens(3, 10), draw.random()) for _ in range(size)]


def print_metrics(step, metrics):
    """Print the numbers that say what was trained, not how fast."""
    trained = {name: value for name, value in sorted(metrics.items()) if not NOT_TRAINED.search(name)}
    found = {name: float(value) for name, value in trained.items() if hasattr(value, "__float__")}
    _print_line(f"JOB step {step}: {found}")


def print_weights(weights, name="weights"):
    """Print sums of an engine's weights, by name, and a hash of all their bits."""
    tensors = [tensor.detach().flatten().contiguous() for _, tensor in sorted(weights.items())]
    sums = [round(tensor.double().abs().sum().item(), 6) for tensor in tensors]
    bits = hashlib.sha256(b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors))
    _print_line(f"JOB {name}: {sums} {bits.hexdigest()}")


def _print_line(line):
    """Write it in one piece, as other threads print, too."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
