"""An imitation of NeMo-RL's module of this name."""

from __future__ import annotations


class Timer:
    """A worker has one, and its times are not looked at."""
