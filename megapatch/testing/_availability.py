"""What of Megatron is installed, without importing it."""

from __future__ import annotations

from .._versions import find_module


def megatron_core_available() -> bool:
    """Whether there is a megatron.core to test with."""
    return find_module("megatron.core") is not None


def megatron_training_available() -> bool:
    """Whether there is a megatron.training: in a checkout always, in wheels of megatron-core from 0.17 on."""
    return find_module("megatron.training") is not None
