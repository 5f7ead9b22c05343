"""What of Megatron is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec


def megatron_core_available() -> bool:
    """Whether there is a megatron.core to test with."""
    return _found("megatron.core")


def megatron_training_available() -> bool:
    """Whether there is a megatron.training: in a checkout always, in wheels of megatron-core from 0.17 on."""
    return _found("megatron.training")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the namespace package megatron
        return False
