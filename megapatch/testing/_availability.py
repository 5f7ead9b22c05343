"""Find out which parts of Megatron are installed, without importing them."""

from __future__ import annotations

from .._python.finding import find_module


def megatron_core_available() -> bool:
    """Return whether megatron.core is installed."""
    return find_module("megatron.core") is not None


def megatron_training_available() -> bool:
    """Return whether megatron.training is installed.

    A checkout of Megatron always has it; wheels of megatron-core have it from 0.17 on.
    """
    return find_module("megatron.training") is not None
