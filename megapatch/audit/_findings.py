"""Keep the findings: each way of breaking a rule once, with a count of how often it was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from .._engine.engine import this_process
from .._engine.record import Record
from .._engine.settings import ACCEPT, REPORT
from .._python.places import Line, in_words, user_lines
from .._ranks import place
from .._version import see
from ..errors import AuditError
from ..patch import Status
from ._rules import RULES
from ._timeline import Timeline

log = logging.getLogger("megapatch")

GONE = "a parameter that the model no longer has"
_NOT_IN_PLACE = frozenset({Status.DISABLED, *(each for each in Status if each.needs_attention)} - {Status.REFUSED})
"""Statuses of patches that may be needed; one that was refused is for code that it does not know."""


class Repair(NamedTuple):
    """A patch that would repair a finding.

    Attributes:
        name: of the patch.
        reason: why it is not in place.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclasses.dataclass
class Finding:
    """A way in which a rule was broken in this process.

    Attributes:
        rule: its name, a key of `megapatch.audit.RULES`.
        kind: which way it is, in a word; likely causes are chosen by it.
        what: one sentence: the event, and the objects that it happened to.
        rank: of torch.distributed, or None without it.
        step: how many optimizer steps this process had made by then.
        where: lines ``file:line in function`` of the user's code then, outermost first.
        count: how often it was seen.
        last_step: how many optimizer steps this process had made when it was seen last.
        repairs: patches that would repair a known cause, and are not in place in this process.
        before: events since the step before, each with its line, by which likely causes are ordered.
    """

    rule: str
    kind: str
    what: str
    rank: int | None
    step: int
    where: tuple[str, ...]
    count: int = 1
    last_step: int = 0
    repairs: tuple[Repair, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def is_note(self) -> bool:
        """Whether it may be meant."""
        return RULES[self.rule].is_note or self.kind in RULES[self.rule].noted

    def __str__(self) -> str:
        rule = RULES[self.rule]
        times = f", {self.count} times in all" if self.count > 1 else ""
        before = f" Just before: {'; '.join(self.before)}." if self.before else ""
        at = f" At {self.where[-1]}." if self.where else ""
        rank = "" if self.rank is None else f" on rank {self.rank}"
        lacking = ", ".join(map(str, self.repairs))
        repairs = f" Patches for known causes that are not in place here: {lacking}." if lacking else ""
        accept = f" If that is meant: {ACCEPT}={self.rule}." if self.is_note else ""
        when = f"after {steps(self.step)}{rank}{times}"
        return f"{self.rule} ({when}): {self.what}. {rule.means}{before}{at}{repairs}{accept}"


class Ledger:
    """The findings and notes of an audit, the number of optimizer steps that it has seen, and other events.

    Args:
        accepted: names of rules whose findings and notes are not kept.

    Attributes:
        accepted: as given.
        step: the number of optimizer steps.
        has_captured: whether a CUDA graph was captured, in which nothing is watched.
        timeline: the other events.
        broken: functions of the audit that have raised, and find nothing.
        during: the user's code at the beginning of the latest call or step.
        place: this rank, how many there are, and whether torch.distributed says so, when last asked.
        judged: by rule, how many things were judged by it.
        changed: called where the report is worth leaving: after a first finding or note of its kind.
    """

    def __init__(self, accepted: Collection[str] = ()) -> None:
        self.accepted = accepted
        self.step = 0
        self.judged: Counter[str] = Counter()
        self.timeline = Timeline()
        self.during: tuple[Line, ...] = ()
        self.place: tuple[int, int, bool] | None = None
        self.changed: Callable[[], None] = lambda: None
        self._looks_back = False
        self._found: dict[tuple[str, str, str], Finding] = {}
        self.broken: set[Callable[..., object]] = set()
        self.has_captured = False
        self._lock = threading.Lock()

    def report(
        self,
        rule: str,
        kind: str,
        what: str,
        where: tuple[str, ...] | None = None,
        step: int | None = None,
        about: str = "",
    ) -> None:
        """Record that a rule was broken; the first time of its kind is logged.

        At WARNING, but notes of a rule after its first one: a process that is killed has said it by then.

        Args:
            kind: tells ways of breaking the same rule apart, in a word by which `_rules` has causes.
            where: as `user_code` returned it when it happened, for a later finding; None for now.
            step: how many optimizer steps this process had made when it happened; None for now.
            about: tells findings of a kind apart, such as those of several readers.
        """
        if rule in self.accepted:
            return
        with self._lock:
            known = self._found.get((rule, kind, about))
            if known is not None:
                known.count, known.last_step = known.count + 1, self.step
                return
            where = self.here() if where is None else where
            known_repairs = repairs(RULES[rule].patches_of(kind))
            first = self.step if step is None else step
            before = self.timeline.since(first - 1)
            rank, _, is_known = place()
            rank_or_none = rank if is_known else None
            finding = Finding(rule, kind, what, rank_or_none, first, where, 1, self.step, known_repairs, before)
            is_new = not finding.is_note or all(other != rule for other, *_ in self._found)
            self._found[rule, kind, about] = finding
        text = f"note: {finding}" if finding.is_note else str(finding)
        if is_new:
            log.warning("audit: %s" + see("audit-finding"), text)
        else:
            log.info("audit: %s", text)
        self.changed()

    def here(self) -> tuple[str, ...]:
        """Return the user's code now; of the latest call or step where there is none, as in autograd's threads."""
        return in_words((() if self._looks_back else user_lines()) or self.during)

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """Give findings of this context the line of the latest call or step, not that of whoever asks for them."""
        self._looks_back = True
        try:
            yield
        finally:
            self._looks_back = False

    def happened(self, kind: str, what: str = "") -> None:
        """Put an event on the timeline, see `_timeline.KINDS`."""
        self.timeline.add(kind, self.step, what)

    def findings(self) -> list[Finding]:
        """Return copies of the findings, without the notes."""
        return self._copies(are_notes=False)

    def notes(self) -> list[Finding]:
        """Return copies of the notes."""
        return self._copies(are_notes=True)

    def _copies(self, are_notes: bool) -> list[Finding]:
        with self._lock:
            found = list(self._found.values())
        return [dataclasses.replace(one) for one in found if one.is_note == are_notes]

    def summarize(self) -> None:
        """Log the findings and notes, or that there are none, in a process that has trained."""
        findings, notes, made = self.findings(), self.notes(), steps(self.step)
        if findings:
            log.warning(
                "audit: found in %s" + see("audit-finding"), "\n  ".join([f"{made}:", *map(str, findings)])
            )
        elif self.step:
            log.info("audit: nothing found in %s", made)
        if notes:
            log.info("audit: noted in %s", "\n  ".join([f"{made}:", *map(str, notes)]))
            count, names = f"{len(notes)} note{'s' * (len(notes) > 1)}", dict.fromkeys(note.rule for note in notes)
            log.warning(
                "audit: %s of %s; with %s=FOLDER, megapatch audit FOLDER shows all" + see("audit-notes"),
                count,
                ", ".join(names),
                REPORT,
            )

    def clear(self) -> None:
        with self._lock:
            self._found.clear()

    def note_bug(self, look: Callable[..., object]) -> None:
        """Log the exception that is being handled, the first time that it comes from this function."""
        if look not in self.broken:
            self.broken.add(look)
            log.warning(
                "audit: %s failed, and finds nothing" + see("audit-failed"), look.__qualname__, exc_info=True
            )

    def note_capture(self) -> None:
        """Log, the first time, that a CUDA graph is captured."""
        if not self.has_captured:
            self.has_captured = True
            log.warning(
                "audit: what is captured in a CUDA graph is not watched, nor are its replays"
                + see("audit-cuda-graph")
            )


def repairs(names: Collection[str]) -> tuple[Repair, ...]:
    """Return those of these patches that are not in place here, and may be needed.

    Their module is loaded, and its diagnosis does not say that it is right. A patch that is switched off is not
    diagnosed; one whose reason is that may not be needed.
    """
    found: dict[str, Repair] = {}
    for record in this_process().records:
        for patch, module in record.rows():
            if patch.name in names and module in sys.modules and _would_repair(record):
                found.setdefault(patch.name, Repair(patch.name, record.reason))
    return tuple(found.values())


def _would_repair(record: Record) -> bool:
    is_needed = record.verdict is None or record.verdict.kind.status is Status.APPLIED
    return record.status in _NOT_IN_PLACE and is_needed


def observes(look: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method as one that never breaks training: it logs its bugs, once, and returns None.

    AuditError is raised on purpose. While a CUDA graph is captured the method is not called: a wait of the host
    would end the capture, and operations would be part of every replay.
    """

    @functools.wraps(look)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _is_capturing():
            self.ledger.note_capture()
            return None
        try:
            return look(self, *args, **kwargs)
        except AuditError:
            raise
        except Exception:
            self.ledger.note_bug(look)
            return None

    return guarded


def _is_capturing() -> bool:
    torch = sys.modules.get("torch")
    # Where CUDA was never used torch may be a build that cannot be asked.
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def user_code() -> tuple[str, ...]:
    """Return the frames that are neither Megatron's, torch's nor ours; in a backward pass there may be none."""
    return in_words(user_lines())


def steps(count: int) -> str:
    return f"{count} optimizer step{'s' * (count != 1)}"


def describe(parameters: list[Any], named: Any) -> str:
    """Name some parameters for a sentence: the first in the order of `named`, and how many more."""
    described = {id(parameter) for parameter in parameters}  # of a bucket in any order, another on each rank
    first = next((name for name, parameter in named if id(parameter) in described), GONE)
    more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return f"{first}{more}"
