"""An imitation of NeMo-RL's module of this name."""

import time


class Timer:
    """As NeMo-RL's, it refuses to start what is running."""

    def __init__(self):
        self._start_times = {}

    def start(self, label, should_log=True):
        if label in self._start_times:
            raise ValueError(f"Timer {label!r} is already running")
        self._start_times[label] = time.perf_counter()

    def stop(self, label, should_log=True):
        return time.perf_counter() - self._start_times.pop(label)
