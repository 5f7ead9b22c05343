"""Reach other processes: `megapatch.reach.ray` for Ray's workers, and `megapatch run` for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ray

__all__ = ["ray"]


def __getattr__(name: str) -> Any:
    if name == "ray":  # loaded on first use: the doctor needs only what is here for `megapatch run`
        from importlib import import_module

        return import_module(".ray", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
