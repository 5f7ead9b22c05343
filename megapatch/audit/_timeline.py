"""Events of a model other than steps: a few of each kind, however many there were."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from .._python.places import user_lines

KINDS = ("model", "load", "save", "forward-only", "export", "offload", "swap", "exception")
"""The kinds of events, in the order in which they are shown. A swap gives weights other values; an export
reads them for a checkpoint or for generation; an exception ends a call or a step."""

KEPT = 16
"""Events of a kind that are kept from its beginning, and as many from its end; the others are counted."""


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        step: how many optimizer steps this process had made by then.
        seconds: since the audit began.
        what: in a few words; "" if the kind says it all.
        where: the line ``file:line in function`` of the user's code; "" if there is none.
    """

    step: int
    seconds: float
    what: str
    where: str


class _Kind:
    """The events of one kind."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Event] = []
        self.last: deque[Event] = deque(maxlen=KEPT)

    def add(self, event: Event) -> None:
        self.count += 1
        (self.first if len(self.first) < KEPT else self.last).append(event)


class Timeline:
    """The events of an audit, by kind: a kind that is frequent does not push out a rare one.

    Attributes:
        began: when the audit began, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.began = time.time()
        self._origin = time.monotonic()
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Return how long ago the audit began."""
        return round(time.monotonic() - self._origin, 3)

    def add(self, kind: str, step: int, what: str = "") -> None:
        """Keep an event, or count it.

        Args:
            kind: of `KINDS`.
            step: how many optimizer steps were made by now.
        """
        where = "".join(map(str, user_lines()[:1]))
        event = Event(step, self.seconds(), what, where)
        with self._lock:
            self._kinds.setdefault(kind, _Kind()).add(event)

    def since(self, step: int) -> tuple[str, ...]:
        """Return the latest of each kind of event but new models since a number of steps, in words."""
        with self._lock:
            latest = {kind: (each.last or each.first)[-1] for kind, each in self._kinds.items() if kind != "model"}
        events = sorted(latest.items(), key=lambda item: item[1].seconds)
        return tuple(
            f"{kind}{f' at {event.where}' if event.where else ''}" for kind, event in events if event.step >= step
        )

    def to_dict(self) -> dict[str, Any]:
        """Return by kind how many there were, and the first and the last of them, JSON-ready."""
        with self._lock:
            return {
                kind: {
                    "count": events.count,
                    "first": [event._asdict() for event in events.first],
                    "last": [event._asdict() for event in events.last],
                }
                for kind in KINDS
                if (events := self._kinds.get(kind)) is not None
            }
