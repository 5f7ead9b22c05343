"""gathered-when-read: parameters that a step has left to be gathered are not read before that.

Watches   start_param_sync() of the bucket groups, in all releases; torch.save() and dist_checkpointing.save();
          collectives over a parameter itself, by which exporters send or assemble it; load_state_dict() of
          Megatron's modules; and all readers of the patches named gathered-when-read: exporters, checkpoints,
          refits. state_dict() of any module and sharded_state_dict() of Megatron's give references, which may be
          read after the gather: a note.
Limits    a copy that is made tensor by tensor by anybody else, and only then sent, is not seen.
Cost      nothing to speak of in a step; a look through the module's parameters where one is read too early.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from .._engine.record import Unloaded
from .._mcore.bucket_groups import bucket_groups, groups_within
from .._mcore.changes import Changes
from .._mcore.sharded_leaves import leaves
from ..patch import ABSENT, NEEDED, UNKNOWN, Patch, PatchInfo, Site, Verdict
from ..patches._catalogue import CATALOGUE, of_name
from ..patches._readers import Reader, ReadingSite
from ._audit import Audit, Part, Step
from ._chunks import states_in
from ._findings import describe, observes
from ._hashes import stored
from ._watching import RAISED, Watcher, around, before, site

_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "gather", "isend", "send")


def _diagnose_known(diagnose: Callable[[ModuleType], Verdict], module: ModuleType) -> Verdict:
    """Watch a reader that gathers by itself, too: what it reads shows whether it does."""
    verdict = diagnose(module)
    return verdict if verdict.kind in (ABSENT, UNKNOWN) else Verdict(NEEDED, "watched")


class GatheredWhenRead(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self.due: weakref.WeakSet[Any] = weakref.WeakSet()
        """Bucket groups whose parameters wait for a gather."""
        self._left_by_step: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that the step that is under way leaves so, and that did not wait before it."""
        self._received: set[int] = set()
        """Parameters that a broadcast has given whole since the last step, by id."""
        self._gathering: list[Any] = []
        self._is_reading = False
        """Whether a reader is under way: its calls for submodules are part of it."""

    def sites(self) -> Iterator[Site]:
        buckets, module = "megatron.core.distributed.param_and_grad_buffer", "megatron.core.transformer.module"
        gather = around(self._begin_gather, self._end_gather)
        yield site(buckets, {"_ParamAndGradBucketGroup.start_param_sync": gather})
        sent = {name: before(functools.partial(self._look_at_sent, name)) for name in _COLLECTIVES}
        yield site("torch.distributed.distributed_c10d", sent)
        yield site("torch.serialization", {"save": before(self._look_at_saved)})
        yield site("torch.nn.modules.module", {"Module.state_dict": self._reading_module("state_dict")})
        reading = {"MegatronModule.sharded_state_dict": self._reading_module("sharded_state_dict")}
        loading = {"MegatronModule.load_state_dict": around(self._changes_of, self._note_loaded)}
        yield site(module, {**reading, **loading})

    def patches(self) -> Iterator[Patch | Unloaded]:
        yield from super().patches()
        for family, by_name in CATALOGUE.items():
            if modules := by_name.get(name := f"{family}.gathered-when-read"):
                known = PatchInfo(self.name, self.doc or "", None, modules)
                load = functools.partial(self._readers_of, name)
                yield Unloaded(self.name, f"megapatch.patches.{family}", (known,), load, names_are_known=True)

    def _readers_of(self, name: str) -> list[Patch]:
        """Return a patch for the readers of this one, which this imports."""
        sites = (
            Site(
                module=found.module,
                diagnose=functools.partial(_diagnose_known, found.diagnose),
                replace={reader.path: functools.partial(self.watch_reader, reader) for reader in found.readers},
            )
            for found in of_name(name).sites
            if isinstance(found, ReadingSite)
        )
        return [self.patch(tuple(sites))]

    # ------------------------------------------------------------------------ events
    def begin_step(self, step: Step) -> None:
        """Note, before the step, the bucket groups that it leaves to be gathered."""
        chunks = [chunk for chunk in step.chunks if chunk.ddp_config.overlap_param_gather]
        fresh = [group for chunk in chunks for group in bucket_groups(chunk) if group not in self.due]
        self.due.update(fresh)
        self._left_by_step = weakref.WeakSet(fresh)
        self._received.clear()
        self.ledger.judged["gathered-when-read"] += bool(chunks)

    def end_step(self, step: Step) -> None:
        """Take that back if the step was skipped."""
        if not step.succeeded:
            self.due -= self._left_by_step

    def _begin_gather(self, group: Any, *_: Any, **__: Any) -> None:
        self._gathering.append(group)

    def _end_gather(self, _: None, result: Any, group: Any, *__: Any, **___: Any) -> None:
        self._gathering.pop()
        if result is not RAISED:
            self._note_gather(group)

    @observes
    def _note_gather(self, group: Any) -> None:
        self.due.discard(group)

    @observes
    def _changes_of(self, module: Any, *_: Any, **__: Any) -> Changes | None:
        return Changes(module.parameters()) if self.due else None

    @observes
    def _note_loaded(self, changes: Changes | None, result: Any, *_: Any, **__: Any) -> None:
        """Take bucket groups that were loaded whole off the list: they need not be gathered."""
        if changes is not None and result is not RAISED:
            self.due.difference_update(groups_within(self.due, changes.made()))

    def unread(self) -> set[int]:
        """Return the parameters, by id, that wait for a gather, and had no gradient since their last step."""
        waiting = (group for group in self.due if not any(state.arrivals for state in states_in(group)))
        return {id(parameter) for group in waiting for parameter in group.params}

    def _waiting(self) -> Iterator[Any]:
        """Yield the parameters that wait for a gather."""
        return (parameter for group in self.due for parameter in group.params)

    # ------------------------------------------------------------------------ readers
    def _reading_module(self, reader: str) -> Watcher:
        def note(module: Any, *_: Any, **__: Any) -> None:
            self._note_read(f"{type(module).__name__}.{reader}()", _parameters([module]), "named")

        return self._outermost(note)

    def watch_reader(self, reader: Reader, function: Callable[..., Any]) -> Callable[..., Any]:
        """Watch a function that is known to read a model, tensor by tensor, which nothing else shows."""
        name = f"{reader.path}()"

        @observes
        def note(part: GatheredWhenRead, model: Callable[[], Any]) -> None:
            part.audit.disturbed("export", name)
            if part.due:
                part._note_read(name, _parameters([model()]))

        if reader.stream:
            return reader.before_reading(function, functools.partial(note, self))
        model_of = reader.model_in(function)
        watch = self._outermost(lambda *args, **kwargs: note(self, lambda: model_of(*args, **kwargs)), always=True)
        return watch(function)

    def _outermost(self, note: Callable[..., None], always: bool = False) -> Watcher:
        """Note the outermost reader only: those that it calls are part of it."""

        def begin(*args: Any, **kwargs: Any) -> bool:
            if self._is_reading or not (self.due or always):
                return False
            note(*args, **kwargs)
            self._is_reading = True
            return True

        def end(is_outermost: bool, *_: Any, **__: Any) -> None:
            self._is_reading &= not is_outermost

        return around(begin, end)

    def _look_at_sent(self, collective: str, /, *args: Any, **kwargs: Any) -> None:
        if self.due and not self._gathering:
            self._note_sent(collective, args, kwargs)

    @observes
    def _look_at_saved(self, obj: Any, *_: Any, **__: Any) -> None:
        if self.due:
            from torch import Tensor

            # A storage has a data_ptr(), too, which warns.
            self.look_at_saved("torch.save()", [each for each in leaves([obj]) if isinstance(each, Tensor)])

    @observes
    def look_at_saved(self, saver: str, tensors: list[Any]) -> None:
        """Report parameters among what is saved."""
        if self.due and not self._is_reading:
            places = {tensor.data_ptr() for tensor in tensors} - {0}
            self._note_read(saver, [each for each in self._waiting() if each.data_ptr() in places])

    @observes
    def _note_read(self, reader: str, parameters: Iterable[Any], kind: str = "read") -> None:
        waiting = {id(parameter) for parameter in self._waiting()}
        read = [parameter for parameter in parameters if id(parameter) in waiting]
        if read:
            what = f"{reader} reads {self._name(read)} before the gather"
            self.ledger.report("gathered-when-read", kind, what, about=reader)

    @observes
    def _note_sent(self, collective: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        from torch import Tensor

        if collective == "broadcast" and not _is_source(*arguments, **options):
            self._note_received(*arguments, **options)
            return
        memory = _memory_of(each for each in (*arguments, *options.values()) if isinstance(each, Tensor))
        sent = [each for each in self._waiting() if memory & _memory_of([each])]
        output = next(iter((*arguments, *options.values())), ())
        outputs = [output] if isinstance(output, Tensor) else output
        if sent and collective.startswith("all_gather") and _memory_of(outputs) & _memory_of(sent):
            self.due.difference_update(groups_within(self.due, sent))  # they are gathered by hand
        elif sent:
            what = f"{collective}() sends {self._name(sent)} before the gather"
            self.ledger.report("gathered-when-read", "sent", what, about=collective)

    def _note_received(self, tensor: Any, *_: Any, **__: Any) -> None:
        """Take bucket groups that were received whole off the list."""
        place = tensor.data_ptr()
        self._received.update(id(each) for each in self._waiting() if each.data_ptr() == place)
        self.due -= {group for group in self.due if self._received.issuperset(map(id, group.params))}

    def _name(self, parameters: list[Any]) -> str:
        named = (pair for chunk in self.audit.models.chunks for pair in chunk.module.named_parameters())
        return describe(parameters, named)


def _is_source(tensor: Any, src: Any = None, group: Any = None, *_: Any, group_src: Any = None, **__: Any) -> bool:
    """Return whether this rank sends in a broadcast, or may do."""
    import torch.distributed as dist

    return bool(src == dist.get_rank() if group_src is None else group_src == dist.get_rank(group))


def _memory_of(tensors: Iterable[Any]) -> set[int]:
    return {part.untyped_storage().data_ptr() for tensor in tensors for part in stored(tensor)} - {0}


def _parameters(arguments: Iterable[Any]) -> Iterator[Any]:
    """Return the parameters of the models among some arguments, and in lists among them."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _parameters(argument)
        elif callable(getattr(argument, "named_modules", None)):
            yield from argument.parameters()
