"""ranks-agree and stages-differ: what all ranks have alike, and what they must not.

Symptom   a rank that missed a gather, a broadcast or a reduce trains another model; its gradients are averaged
          with the others' all the same. Or all pipeline stages have the same seed, and drop the same elements.
Upstream  NVIDIA-NeMo/RL#3773, NovaSky-AI/SkyRL#1212.
Seam      the optimizer step, as it begins, every MEGAPATCH_AUDIT_EVERY steps (50): a hash of the parameters that
          are the same in a group, and one all-reduce of 48 bytes a group. model_parallel_cuda_manual_seed() shows
          seeds.
Limits    only where every rank is audited and comes to this step, which ranks settle through torch.distributed's
          store before each collective. A difference is found within as many steps as lie between two hashes, and
          named one step later.
Cost      reads the parameters once in that step, after a meeting in the store, a tenth of a millisecond where that
          is a server near by; copies at most 128 KiB at a time, and makes no sync between hashes.
"""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._engine.settings import EVERY
from ..errors import AuditError, MisuseError
from ..patch import Patch
from ._findings import LEDGER, describe, note_bug, observes
from ._optimizers import DDPS
from ._participants import all_have_come, all_ranks_are_audited
from ._sites import site

log = logging.getLogger("megapatch")

_DEFAULT = 50
_WIDTHS = (1024, 1021)
_SMALL = 2**16
"""Bytes: a tensor of at most this size is hashed together with others."""
_ODD = 0x1E3779B97F4A7C15


class _Settings:
    every = _DEFAULT
    raises = False


_seeds: list[int] = []
"""The seed that this rank was given last."""


class _Replicas(NamedTuple):
    """Parameters that are the same on all ranks of a process group."""

    what: str
    group: Any
    parameters: list[Any]


class _Compared(NamedTuple):
    """Hashes that are on their way: the highest of each, and the highest of its complement."""

    replicas: _Replicas
    hashes: Any


_COMPARED = "_megapatch_compared"
"""Attribute of a model's first chunk: what was compared in its last step. Nothing else keeps its groups alive."""


def configure(steps: int | None, raises: bool) -> None:
    """Set how many optimizer steps lie between two comparisons, and whether a finding ends training.

    Args:
        steps: None for what the environment says.

    Raises:
        MisuseError: for a number below 1.
    """
    expected = "expected a number of steps, 1 or more"
    if steps is None:
        text = os.environ.get(EVERY, "").strip() or str(_DEFAULT)
        steps = int(text) if text.isdecimal() else 0
        if steps < 1:
            log.warning("%s=%s: %s; it is taken for %s", EVERY, text, expected, _DEFAULT)
            steps = _DEFAULT
    elif steps < 1:
        raise MisuseError(f"every={steps}: {expected}")
    _Settings.every, _Settings.raises = steps, raises


def is_due() -> bool:
    """Return whether the audit may wait for a GPU now."""
    return LEDGER.step % _Settings.every == 0


@observes
def compare(ddps: list[Any]) -> None:
    """Compare ranks as an optimizer step begins, if it is time to, and report what the last comparison found."""
    if not ddps:
        return
    compared: list[_Compared] = []
    before = vars(ddps[0]).pop(_COMPARED, ())
    if not all_ranks_are_audited(f"every {_Settings.every}, raises {_Settings.raises}"):
        return
    for earlier in before:
        _judge(earlier, ddps)
    if _Settings.raises:
        _raise_together(ddps)
    if not is_due():
        return
    if _seeds:
        _compare_seeds(ddps)
    for replicas in _replicas(ddps):
        if all_have_come(replicas.group):
            hashes = _highest(_hashes([replicas.parameters]), replicas.group)
            compared.append(_Compared(replicas, hashes))
    vars(ddps[0])[_COMPARED] = compared


def forget() -> None:
    """Drop what is being compared."""
    for ddp in list(DDPS):
        vars(ddp).pop(_COMPARED, None)


def _judge(earlier: _Compared, ddps: list[Any]) -> None:
    """Read a result that every rank of the group has alike; where they differ, ask again by parameter."""
    what, group, parameters = earlier.replicas
    if not _differ(earlier.hashes).any():
        return
    wrong = parameters
    if all_have_come(group):
        differing = _differ(_highest(_hashes([[parameter] for parameter in parameters]), group)).tolist()
        wrong = [parameter for parameter, differs in zip(parameters, differing, strict=True) if differs]
    named = (pair for ddp in ddps for pair in ddp.module.named_parameters())
    name = describe(wrong or parameters, named)
    LEDGER.report("ranks-agree", what, f"{name} is not the same on all {what} ranks")


def _raise_together(ddps: list[Any]) -> None:
    """Raise AuditError on all ranks if one of them has found something. Waits for a GPU in every step."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    findings = LEDGER.findings()
    device = next(ddps[0].module.parameters()).device
    highest = torch.tensor([dist.get_rank() + 1 if findings else 0], device=device)
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
    ):
        if not all_have_come(group):
            return
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    if rank := int(highest):
        own = "; ".join(str(finding) for finding in findings)
        raise AuditError(f"the audit has found something: {own or f'see the log of rank {rank - 1}'}")


# ------------------------------------------------------------------------ which parameters, over which ranks
def _replicas(ddps: list[Any]) -> Iterator[_Replicas]:
    from megatron.core import parallel_state

    parameters = [parameter for ddp in ddps for parameter in ddp.module.parameters()]
    dense = [parameter for parameter in parameters if getattr(parameter, "allreduce", True)]
    experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
    whole = [parameter for parameter in dense if not getattr(parameter, "tensor_model_parallel", False)]
    tied = [parameter for parameter in dense if getattr(parameter, "shared_embedding", False)]
    found = [
        _Replicas("data-parallel", parallel_state.get_data_parallel_group(with_context_parallel=True), dense),
        _Replicas("tensor-parallel", parallel_state.get_tensor_model_parallel_group(), whole),
    ]
    if experts:
        found.append(_Replicas("expert-data-parallel", parallel_state.get_expert_data_parallel_group(), experts))
    if tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        found.append(_Replicas("embedding", parallel_state.get_embedding_group(), tied))
    return (one for one in found if one.parameters and one.group.size() > 1)


# ------------------------------------------------------------------------ hashes
def hash_of(parameters: Iterable[Any]) -> Any:
    """Return two numbers, of 16 bytes together, that depend on every bit and its place, and on all shapes."""
    import torch

    listed = [parameter.detach() for parameter in parameters]
    sums = torch.cat([part for memory in _joined(listed) for part in _sums(memory)])
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device).mul_(_ODD)  # odd, with little in common
    mixed = _mix(sums.add_(places))
    numbers = torch.stack([mixed.sum(), mixed.mul_(places).sum()])
    return numbers + zlib.crc32(repr([(tensor.shape, tensor.dtype) for tensor in listed]).encode())


def _joined(tensors: list[Any]) -> Iterator[Any]:
    """Yield the memory of each tensor, as bytes; small ones together, as a sum costs more than to copy them."""
    import torch

    small: list[Any] = []
    size = 0
    for tensor in tensors:
        memory = tensor.contiguous().view(-1).view(torch.uint8)
        if memory.numel() > _SMALL:
            yield memory
            continue
        small.append(memory)
        size += memory.numel()
        if size > _SMALL:
            yield torch.cat(small)
            small, size = [], 0
    if small:
        yield torch.cat(small)


def _hashes(parts: list[list[Any]]) -> Any:
    """Return two numbers for each list of parameters, and a third: 1 where they could not be hashed on this rank.

    A rank that fails here, for want of memory perhaps, still has to make the collective that others wait in.
    """
    import torch

    try:
        numbers = torch.stack([hash_of(part) for part in parts])
        failed = 0
    except Exception:
        note_bug(hash_of)
        numbers = torch.zeros(len(parts), 2, dtype=torch.int64, device=parts[0][0].device)
        failed = 1
    return torch.nn.functional.pad(numbers, (0, 1), value=failed)


def _mix(numbers: Any) -> Any:
    """Let the high bits of each number count in its low ones, and the other way round; different ones stay so."""
    for _ in range(2):
        numbers.bitwise_xor_((numbers >> 32).bitwise_and_(0xFFFFFFFF)).mul_(_ODD)
    return numbers


def _sums(memory: Any) -> Iterator[Any]:
    """Add up bytes in columns: twice, by two widths, so that hardly any two places share both."""
    import torch

    if memory.data_ptr() % 8:
        memory = memory.clone()
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)  # added up many times faster than any others
    for width in _WIDTHS:
        rows = words.numel() // width * width
        yield words[:rows].view(-1, width).sum(0)
        yield words[rows:]
    yield memory[whole:].long()


def _highest(hashes: Any, group: Any) -> Any:
    """Return, for each hash and its complement, the highest of the group's ranks."""
    import torch
    import torch.distributed as dist

    both = torch.stack([hashes, ~hashes])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both


def _differ(highest: Any) -> Any:
    """Return by hash whether the highest is not the lowest, where no rank has failed to make one."""
    return (highest[0] != ~highest[1]).any(dim=1) & (highest[0, :, 2] == 0)


# ------------------------------------------------------------------------ seeds
def watch_seed(seed_all: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(seed_all)
    def patched_model_parallel_cuda_manual_seed(seed: Any, *args: Any, **kwargs: Any) -> Any:
        _note_seed(seed)
        return seed_all(seed, *args, **kwargs)

    return patched_model_parallel_cuda_manual_seed


@observes
def _note_seed(seed: Any) -> None:
    _seeds[:] = [int(seed)]


def _compare_seeds(ddps: list[Any]) -> None:
    """Report stages with one seed: once for a seed, as this waits for a GPU."""
    import torch
    from megatron.core import parallel_state

    seed = _seeds.pop()
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        device = next(ddps[0].module.parameters()).device
        if not all_have_come(group):
            return
        highest = _highest(torch.tensor([[seed, seed, 0]], device=device), group)
        if not _differ(highest).any():
            LEDGER.report("stages-differ", "seed", f"all {group.size()} pipeline stages were seeded with {seed}")


PATCH = Patch(
    name="audit.ranks",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=(
        site(
            "megatron.core.tensor_parallel.random",
            {"model_parallel_cuda_manual_seed": watch_seed},
            expected={"model_parallel_cuda_manual_seed": ("seed",)},
        ),
    ),
)
