"""ranks-agree, stages-differ, seeded-once: ranks have the same parameters, stages and steps other random numbers.

Watches   the optimizer step, as it begins, every MEGAPATCH_AUDIT_EVERY steps (50), and after 1, 2, 4, 8, 16 and
          32. Each group hashes the parameters that its ranks share, and makes one all-reduce of 48 or 144 bytes.
          A rank that missed a gather, a broadcast or a reduce trains another model, whose gradients are averaged
          with the others' all the same. model_parallel_cuda_manual_seed(), in all releases, shows seeds: pipeline
          stages with the same one drop the same elements, and so does a model for which one is set again.
Limits    only where every rank is audited and comes to this step. Ranks settle that through torch.distributed's
          store, in each step that compares. A difference is found within as many steps as lie between two hashes,
          and named one step later. Of Transformer Engine's fp8 weights the bytes are compared, not the scales of
          blocks; GTP's, by the ranks that have the same part. Values that swapped places may pass one comparison;
          the next sums bytes in columns of another width. Nothing is compared while a CUDA graph is captured, nor
          as the process ends: a rank that ends early would be waited for. If some ranks freed a model whose
          optimizer still steps and others did not, the others wait once, then stop comparing.
Cost      reads the parameters once in that step, after one meeting of all ranks in the store, whose server does
          two operations a rank; copies at most 128 KiB at a time, and makes no sync between hashes. With `raise`
          the meeting, two all-reduces of 8 bytes and a sync are in every step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._mcore.side_table import SideTable
from .._reporting.numbers import numbered
from .._version import see
from ..errors import AuditError
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import describe, observes, steps, user_code
from ._gathered_when_read import GatheredWhenRead
from ._gradients import Gradients
from ._hashes import WIDTHS, hash_of, stored
from ._microbatches import Microbatches
from ._participants import Participants
from ._training_mode import TrainingMode
from ._watching import before, site

log = logging.getLogger("megapatch")

DATA, EXPERT_DATA, TENSOR = "data-parallel", "expert-data-parallel", "tensor-parallel"


class Replicas(NamedTuple):
    """Parameters that all ranks of a group have alike."""

    what: str
    group: Any
    parameters: list[Any]


class _Highest:
    """The highest of a group's ranks, of each hash and of its complement, on its way."""

    def __init__(self, hashes: Any, group: Any) -> None:
        import torch
        import torch.distributed as dist

        self._both = torch.stack([hashes, ~hashes])
        self._sent = dist.all_reduce(self._both, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def read(self) -> list[list[list[int]]]:
        """Return two lists, in the order of the hashes. Waits for the other ranks and the GPU."""
        self._sent.wait()
        found: list[list[list[int]]] = self._both.tolist()
        return found


class _Compared(NamedTuple):
    """A comparison that is on its way."""

    replicas: Replicas
    highest: _Highest
    widths: tuple[int, ...]
    is_reported: bool = False


class RanksAgree(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._participants = Participants()
        self._compared = SideTable()
        """About a model's first chunk: the comparisons in its last step. Nothing else keeps their groups alive."""
        self._counts = SideTable()
        """About a model's first chunk: how often a kind of group has compared it; None if not all ranks do."""
        self._seed: tuple[int, tuple[str, ...]] | None = None
        """The seed that this rank was given last, and where, until it has been compared."""
        self._seeds: dict[int, int] = {}
        """By seed, how many optimizer steps had been made when it was set first."""
        self._own = SideTable()
        """About a model's first chunk, by kind of group: the ids of parameters that may be a rank's own. They have
        differed from the beginning, and are few, or Megatron does not reduce them."""
        self._unknown: set[str] = set()
        """Names of classes whose parameters are not compared."""

    def sites(self) -> Iterator[Site]:
        path = "model_parallel_cuda_manual_seed"
        watched = {path: before(self._note_seed)}
        yield site("megatron.core.tensor_parallel.random", watched, expected={path: ("seed",)})

    @property
    def compares(self) -> bool:
        """Whether all ranks have come to all comparisons until now."""
        return self._participants.are_known

    def begin_step(self, step: Step) -> None:
        """Compare ranks, if it is time to, and report the differences that the last comparison found."""
        chunks = step.chunks
        if not self.audit.models.chunks:
            return
        before = self._compared.pop(chunks[0], []) if chunks else []
        if not self._participants.all_are_audited(str(self.audit.settings)):
            return
        for earlier in before:
            self._judge(earlier, chunks)
        raises, is_due = self.audit.settings.raises, self.audit.is_due()
        if not (raises or is_due):
            return
        # A rank that has nothing to compare comes all the same; one that fails from here on would be waited for.
        found = list(replicas_of(self._known(chunks))) if is_due else []
        if not self._participants.all_have_come():
            return
        if raises:
            self._raise_together()
        if is_due and self._seed is not None:
            self._compare_seeds(*self._seed)
        if found:
            self._compare(found, chunks)

    def _compare(self, found: list[Replicas], chunks: list[Any]) -> None:
        """Send hashes of a model's parameters on their way, to be judged in its next step."""
        compared: list[_Compared] = []
        for replicas in found:
            count = self._count(replicas, chunks[0])
            if count is not None:
                widths = (WIDTHS[count % len(WIDTHS)],)  # of all ranks alike: each comparison reads memory once
                hashes = self._hashes([replicas.parameters], widths)
                if replicas.what == DATA:
                    hashes = self.audit.part(Microbatches).added_to(hashes, chunks)
                compared.append(_Compared(replicas, _Highest(hashes, replicas.group), widths))
                self.ledger.judged["ranks-agree"] += 1
        self._compared.set(chunks[0], compared)

    def _count(self, replicas: Replicas, chunk: Any) -> int | None:
        """Count comparisons of a model's parameters, from 0 on; None if not all ranks of the group compare them.

        The ranks meet once to find out.
        """
        counts: dict[str, int | None] = self._counts.get_or_make(chunk, dict)
        count = counts.get(replicas.what)
        if replicas.what not in counts:
            counts[replicas.what] = 0 if self._participants.all_have_come(replicas.group) else None
        elif count is not None:
            counts[replicas.what] = count + 1
        return counts[replicas.what]

    def judge(self) -> None:
        """Report differences of the last comparison, which no step has named yet. Makes no collective."""
        for chunk in list(self.audit.models.chunks):
            compared = self._compared.get(chunk, [])
            for earlier in compared:
                if not earlier.is_reported and _differ(earlier.highest.read())[0]:
                    own = self._own.get(chunk, {}).get(earlier.replicas.what)
                    kind = self._kind(earlier.replicas, is_own=own is None or bool(own), chunks=[chunk])
                    what = f"a parameter is not the same on {ranks_of(earlier.replicas)}"
                    self.ledger.report("ranks-agree", kind, what)
            # They stay: all ranks ask for names together in the next step.
            self._compared.set(chunk, [earlier._replace(is_reported=True) for earlier in compared])

    def _known(self, chunks: list[Any]) -> list[Any]:
        """Return the parameters whose memory can be hashed; log the classes of others, once each."""
        parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
        others = {type(parameter).__name__ for parameter in parameters if not stored(parameter)}
        for name in sorted(others - self._unknown):
            log.warning(
                "audit: parameters of the class %s are not compared: their memory is not known"
                + see("audit-memory"),
                name,
            )
        self._unknown |= others
        return [parameter for parameter in parameters if stored(parameter)] if others else parameters

    def forget(self) -> None:
        self._seeds.clear()
        for chunk in list(self.audit.models.chunks):
            self._compared.pop(chunk, None)

    def _judge(self, earlier: _Compared, chunks: list[Any]) -> None:
        """Read a result that every rank of the group has alike; where they differ, ask again by parameter."""
        what, group, parameters = earlier.replicas
        highest = earlier.highest.read()
        if what == DATA:
            self.audit.part(Microbatches).judge_ranks(ranks_of(earlier.replicas), *(each[-2:] for each in highest))
        own = self._own.get_or_make(chunks[0], dict)
        if not _differ(highest)[0]:
            own.setdefault(what, set())
            return
        wrong = parameters
        if self._participants.all_have_come(group, for_names=True):
            hashes = self._hashes([[parameter] for parameter in parameters], earlier.widths)
            differing = _differ(_Highest(hashes, group).read())
            wrong = [each for each, differs in zip(parameters, differing, strict=True) if differs] or parameters
        few = len(_matrices(wrong)) <= len(_matrices(parameters)) / 4
        mine = own.setdefault(what, {id(parameter) for parameter in wrong} if few else set())
        if is_own := all(_is_own(each, mine, chunks) for each in wrong):
            mine.update(map(id, wrong))
        kind = self._kind(earlier.replicas, is_own, chunks)
        named = (pair for chunk in chunks for pair in chunk.module.named_parameters())
        is_not = f"{describe(wrong, named)} {'are' if wrong[1:] else 'is'} not"
        self.ledger.report("ranks-agree", kind, f"{is_not} the same on {ranks_of(earlier.replicas)}")

    def _kind(self, replicas: Replicas, is_own: bool, chunks: list[Any]) -> str:
        """Return the kind of a difference: that of the group, unless it may be meant."""
        is_apart = is_own or any(chunk in self.audit.part(Gradients).apart for chunk in chunks)
        return "apart" if is_apart else replicas.what

    def _hashes(self, parts: list[list[Any]], widths: tuple[int, ...]) -> Any:
        """Return two numbers for each list of parameters, and a third: 1 where this rank could not hash them.

        Parameters that wait for a gather, and that no forward pass has used so since the step, are left out.
        A rank that fails here, for want of memory perhaps, still has to make the collective that others wait in.
        """
        import torch

        numbers = torch.ones(len(parts), 3, dtype=torch.int64, device=parts[0][0].device)
        try:
            unread = self.audit.part(GatheredWhenRead).unread()
            for row, part in zip(numbers, parts, strict=True):
                if there := [parameter for parameter in part if id(parameter) not in unread]:
                    row[:2], row[2] = hash_of(there, widths), 0
        except Exception:
            self.ledger.note_bug(hash_of)
            numbers.fill_(1)
        return numbers

    def _raise_together(self) -> None:
        """Raise AuditError on all ranks if one of them has found something. Waits for a GPU in every step."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        findings = self.ledger.findings()
        highest = torch.tensor([dist.get_rank() + 1 if findings else 0], device=self._device())
        for group in (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_model_parallel_group(),
        ):
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        if rank := int(highest):
            own = "; ".join(str(finding) for finding in findings)
            raise AuditError(f"the audit has found something: {own or f'see the log of rank {rank - 1}'}")

    def _device(self) -> Any:
        """Return the device of any model: this step's may have nothing that is trained on this rank."""
        return next(next(chunk.module.parameters()).device for chunk in self.audit.models.chunks)

    # ------------------------------------------------------------------------ seeds
    @observes
    def _note_seed(self, seed: Any, *_: Any, **__: Any) -> None:
        self._seed = int(seed), user_code()
        self.ledger.judged["seeded-once"] += self.ledger.step > 0
        first = self._seeds.setdefault(int(seed), self.ledger.step)
        if first < self.ledger.step and self.audit.part(TrainingMode).drops():
            what = f"the seed {seed} is set again, as it was after {steps(first)}"
            self.ledger.report("seeded-once", "again", what)

    def _compare_seeds(self, seed: int, where: tuple[str, ...]) -> None:
        """Report stages with one seed: once for a seed. Numbers of the host meet in the store, not on a GPU."""
        from megatron.core import parallel_state

        self._seed = None
        group = parallel_state.get_pipeline_model_parallel_group()
        self.ledger.judged["stages-differ"] += group.size() > 1
        if group.size() > 1 and self._participants.number_who_say(f"seed {seed}", group) == group.size():
            what = f"all {group.size()} pipeline stages were seeded with {seed}"
            self.ledger.report("stages-differ", "seed", what, where)


# ------------------------------------------------------------------------ over the ranks of a group
def _differ(highest: list[list[list[int]]]) -> list[bool]:
    """Return by hash whether the highest is not the lowest, where no rank has failed to make one."""
    return [
        not mine[2] and any(one != ~other for one, other in zip(mine, others, strict=True))
        for mine, others in zip(*highest, strict=True)
    ]


# ------------------------------------------------------------------------ which ranks have what alike
def _matrices(parameters: list[Any]) -> list[Any]:
    """Return those that are made at random: norms and biases are made alike on all ranks, whatever their seeds."""
    return [parameter for parameter in parameters if parameter.ndim > 1]


def _is_own(parameter: Any, own: set[int], chunks: list[Any]) -> bool:
    """Return whether a parameter may be meant to differ: it always has, or Megatron reduces no gradient of it."""
    return id(parameter) in own or all(parameter not in chunk.param_to_bucket_group for chunk in chunks)


def replicas_of(parameters: list[Any]) -> Iterator[Replicas]:
    """Yield the parameters that this rank and others have, by group, if it has more than one rank."""
    from megatron.core import parallel_state

    dense = [parameter for parameter in parameters if getattr(parameter, "allreduce", True)]
    experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
    whole = [parameter for parameter in dense if not getattr(parameter, "tensor_model_parallel", False)]
    tied = [parameter for parameter in dense if getattr(parameter, "shared_embedding", False)]
    group = _replicating(parallel_state.get_data_parallel_group, with_context_parallel=True)
    found = [Replicas(DATA, group, dense)]
    found.append(Replicas(TENSOR, parallel_state.get_tensor_model_parallel_group(), whole))
    if experts:
        group = _replicating(parallel_state.get_expert_data_parallel_group)
        found.append(Replicas(EXPERT_DATA, group, experts))
    if tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        found.append(Replicas("embedding", parallel_state.get_embedding_group(), tied))
    return (replicas for replicas in found if replicas.parameters and replicas.group.size() > 1)


def ranks_of(replicas: Replicas) -> str:
    """Return the ranks of their group, in words."""
    import torch.distributed as dist

    try:
        ranks = numbered("rank", dist.get_process_group_ranks(replicas.group))
    except KeyError:  # torch knows a group that was destroyed no more
        ranks = "of a layout that was taken down"
    return f"all {replicas.what} ranks ({ranks})"


def _replicating(get_group: Callable[..., Any], **options: Any) -> Any:
    """Return a group of ranks with the same weights: from 0.19 on, without those that GTP shards weights over."""
    if "with_gtp_remat" in inspect.signature(get_group).parameters:
        options["with_gtp_remat"] = False
    return get_group(**options)
