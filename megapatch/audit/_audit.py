"""The audit of a process, and the parts that it consists of.

`start()` makes an Audit and `stop()` drops it. All that it knows is in it and its parts, and about Megatron's
objects in side tables, so the next audit begins with nothing.

A new rule is one class derived from Part, in a file of its own, whose name is in `_ORDER`, in `__init__.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from .._engine.record import Unloaded
from ..patch import Patch, Site
from ._chunks import Models, optimizers_in
from ._findings import Ledger, observes
from ._settings import Settings

_P = TypeVar("_P", bound="Part")


class Call:
    """A forward-backward call.

    Attributes:
        chunks: of the model that it runs.
        trains: whether it has a backward pass.
        has_returned: whether it has ended without an exception.
    """

    def __init__(self, chunks: list[Any], trains: bool) -> None:
        self.chunks, self.trains, self.has_returned = chunks, trains, False


class Step:
    """A step of an optimizer that no other contains.

    Attributes:
        optimizer: whose step it is.
        optimizers: those that it consists of, which divide gradients by the loss scale.
        chunks: those that it steps.
        has_gradients: whether any gradient has arrived since the last step.
        succeeded: whether Megatron has made the step rather than skipped it, once it is over.
    """

    def __init__(self, optimizer: Any, chunks: list[Any]) -> None:
        self.optimizer, self.optimizers, self.chunks = optimizer, optimizers_in(optimizer), chunks
        self.has_gradients = self.succeeded = False


class Audit:
    """An observer of this process, from `start()` to `stop()`.

    Args:
        parts: classes of parts, in the order in which they see what happens.
        settings: may be replaced while the audit watches.

    Attributes:
        ledger: the findings, and the number of optimizer steps.
        models: the chunks that it knows.
        resets: how many buffers were reset since it began, which zeroes their gradients.
        loads: how often weights, or an optimizer's state, were loaded.
        may_have_broken: whether something that often breaks a model has happened since the last step. That is a
            load, a save, an export, an offload, a swap, an exception, or a forward-only call; or the model is new.
        parts: made for this audit.
        patches: of the parts, for the engine to install below all others.
    """

    def __init__(self, parts: Iterable[type[Part]], settings: Settings) -> None:
        self.settings = settings
        self.ledger, self.models = Ledger(settings.accepted), Models()
        self.resets = self.loads = 0
        self.may_have_broken = True
        self.parts = tuple(part(self) for part in parts)
        self.patches = tuple(patch for part in self.parts for patch in part.patches())

    def part(self, kind: type[_P]) -> _P:
        """Return the part of this class."""
        (part,) = (part for part in self.parts if isinstance(part, kind))
        return part

    def is_due(self) -> bool:
        """Return whether ranks are compared in this step, in which the audit may wait for a GPU.

        That is in every so many steps, and in the first ones after 1, 2, 4, 8 and so on: a smoke test is short.
        """
        step, every = self.ledger.step, self.settings.every
        return step % every == 0 or (step < every and step & (step - 1) == 0)

    def looks(self) -> bool:
        """Return whether this rank looks closely at its own parameters in this step. Ranks may differ in that."""
        return self.is_due() or self.may_have_broken

    def disturbed(self, kind: str, what: str = "") -> None:
        """Put an event on the timeline that often breaks a model: ranks look closely in the step after it."""
        self.may_have_broken = True
        self.ledger.happened(kind, what)

    def judge(self) -> None:
        """Report everything that waits for its judgment."""
        for part in self.parts:
            part.judge()

    def forget(self) -> None:
        """Drop comparisons that are under way."""
        for part in self.parts:
            part.forget()

    def end(self) -> None:
        """Judge everything that waits, and let go of Megatron's objects."""
        self.judge()
        self.forget()
        for part in self.parts:
            part.end()


class Events:
    """What all parts of an audit see, in turn."""

    def joined(self, chunk: Any) -> None:
        """See that the audit knows one more chunk, as it is being wrapped or in its first call."""

    def begin_call(self, call: Call) -> None:
        """See that a forward-backward call begins."""

    def end_call(self, call: Call) -> None:
        """See that it has ended, or raised."""

    def trained_on(self, chunk: Any, loss: Any, num_tokens: Any) -> None:
        """See a microbatch of a call that trains. Its loss is None in a stage that is not the last."""

    def finishing(self, chunks: list[Any], num_tokens: Any) -> None:
        """See that finalize_model_grads() begins. The number of tokens is None where gradients are not divided."""

    def begin_step(self, step: Step) -> None:
        """See that an optimizer step begins, and judge the calls that led to it."""

    def end_step(self, step: Step) -> None:
        """See that it has ended. A step that raised is `interrupted` instead."""

    def interrupted(self, chunks: list[Any]) -> None:
        """See that a call or a step of these chunks has raised, so that its gradients may be dropped."""

    def zeroed(self, buffer: Any) -> None:
        """See that a gradient buffer is about to be zeroed."""

    def judge(self) -> None:
        """Report everything that waits for its judgment, as findings are asked for. It may wait for a GPU."""

    def forget(self) -> None:
        """Drop comparisons that are under way, as all ranks do now."""

    def end(self) -> None:
        """Let go of Megatron's objects: the audit has ended."""


class Part(Events):
    """Something that the audit watches.

    It replaces functions at its `sites` by ones that look on, and overrides the methods of `Events` that it wants
    to see. Its bugs must not break training: they are guarded, as other looks are by `observes`.

    Attributes:
        audit: the one that it is part of.
        ledger: that audit's.
    """

    def __init_subclass__(cls) -> None:
        for name in vars(cls).keys() & {name for name in vars(Events) if not name.startswith("_")}:
            setattr(cls, name, observes(getattr(cls, name)))

    def __init__(self, audit: Audit) -> None:
        self.audit, self.ledger = audit, audit.ledger

    @property
    def name(self) -> str:
        """The name of its patch, that of its module."""
        return f"audit.{type(self).__module__.rpartition('._')[2].replace('_', '-')}"

    @property
    def doc(self) -> str | None:
        """The docstring of its module, whose first line names the rules that it watches."""
        return sys.modules[type(self).__module__].__doc__

    def sites(self) -> Iterator[Site]:
        """Yield the sites where it watches, with this part's own functions in them; some see what others show."""
        yield from ()

    def patches(self) -> Iterator[Patch | Unloaded]:
        """Yield what the engine installs for this part, unless it has no sites."""
        if sites := tuple(self.sites()):
            yield self.patch(sites)

    def patch(self, sites: tuple[Site, ...]) -> Patch:
        """Return the patch of this part with these sites."""
        return Patch(self.name, self.doc, None, sites)


def part_of(module: ModuleType) -> type[Part]:
    """Return the class of a part that a module has."""
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return next(kind for kind in classes if kind.__module__ == module.__name__ and issubclass(kind, Part))
