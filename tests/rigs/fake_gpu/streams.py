"""Streams of the fake GPU, as an order of events: each knows up to when it has waited for each other.

All of them really compute at once, where they are asked to. An operation that a real GPU might run too early, as
nothing makes its stream wait for the one that writes what it uses, raises Race.
"""

from __future__ import annotations

import contextlib

import torch

from .memory import extent, memory_of


class Race(AssertionError):
    """An operation uses memory that another stream may still be writing to."""


class Stream:
    """A stream, with its clock, and the clocks of others as far as it has waited for them."""

    def __init__(self, *args, name="side", **kwargs):
        self.name, self.now, self.seen = name, 0, {}

    def __enter__(self):
        _stack.append(self)
        return self

    def __exit__(self, *exception):
        _stack.remove(self)

    def tick(self):
        self.now += 1
        return self.now

    def has_seen(self, other, when):
        return other is self or self.seen.get(other, 0) >= when

    def _learn(self, seen):
        for stream, when in seen.items():
            self.seen[stream] = max(when, self.seen.get(stream, 0))

    def wait_stream(self, other):
        self._learn({**other.seen, other: other.now})

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self._learn(event.seen)

    def synchronize(self):
        """Have the host wait; what it gives any stream to do comes after that."""
        _host.wait_stream(self)

    def query(self):
        return True


class Event:
    def __init__(self, *args, **kwargs):
        self.seen = {}

    def record(self, stream=None):
        stream = stream or current_stream()
        self.seen = {**stream.seen, stream: stream.now}

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        _host.wait_event(self)

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0


default = Stream(name="default")
_host = Stream(name="host")
communication = Stream(name="communication")  # of all groups
_stack = [default]
_all = [default, communication]


def current_stream(device=None):
    return _stack[-1]


def side_stream(*args, **kwargs):
    stream = Stream(*args, **kwargs)
    _all.append(stream)
    return stream


def synchronize(device=None):
    for stream in _all:
        _host.wait_stream(stream)


def give_streams():
    """Replace torch's streams, in this process."""
    for name, function in {
        "Stream": side_stream,
        "Event": Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": current_stream,
        "default_stream": lambda device=None: default,
        "synchronize": synchronize,
    }.items():
        setattr(torch.cuda, name, function)


def are_given():
    return torch.cuda.current_stream is current_stream


def launch(output):
    """Begin to write in the stream of communication; return what `join` takes, or None for the host's memory."""
    if memory_of(output) is None:
        return None
    communication.wait_stream(current_stream())
    when = communication.tick()
    write(output, communication, when)
    return communication, when


def join(stream, when):
    """Have the current stream wait until another was there."""
    current_stream()._learn({stream: when})


def look(tensors, written, what):
    """Note an operation on these tensors of the GPU in the current stream, or raise Race."""
    stream = current_stream()
    for tensor in tensors:
        _check(stream, tensor, memory_of(tensor), what)
    if written:
        when = stream.tick()
        for tensor in written:
            write(tensor, stream, when)


def write(tensor, stream, when):
    """Note that a stream writes to a tensor."""
    memory = memory_of(tensor)
    if stream is default:
        memory.written[stream] = when
        return
    memory.flying = [one for one in memory.flying if not all(each.has_seen(*one[2:]) for each in _all)]
    memory.flying.append((*extent(tensor), stream, when))


def _check(stream, tensor, memory, what):
    writers = list(memory.written.items())
    if memory.flying:
        begin, end = extent(tensor)
        writers += [(other, when) for low, high, other, when in memory.flying if low < end and begin < high]
    for other, when in writers:
        if not stream.has_seen(other, when) and not _host.has_seen(other, when):
            raise Race(
                f"{what} of {tuple(tensor.shape)} in the {stream.name} stream, which has not waited for the "
                f"{other.name} stream, which writes there"
            )
