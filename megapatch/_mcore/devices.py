"""The device whose tensors the collectives of a process group take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def device_of(group: Any = None) -> torch.device:
    """Return a device for the tensors of a group's collectives; without a group, of those of all ranks."""
    import torch.distributed as dist

    return device_for(dist.get_backend(group))


def device_for(backend: str) -> torch.device:
    """Return a device whose tensors the backend's collectives take: the CPU, or else this rank's current one."""
    import torch

    kinds = kinds_of_devices(backend)
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = kinds[0]
    return torch.device(kind, getattr(torch, kind).current_device())


def kinds_of_devices(backend: str) -> list[str]:
    """Return the kinds of devices that a backend serves.

    torch knows that of its own backends (nccl, xccl) and of those that others have registered (hccl for npu);
    ``cpu:gloo,cuda:nccl`` names them.
    """
    from torch.distributed import Backend

    if ":" in backend:
        return [part.partition(":")[0] for part in backend.split(",")]
    known: dict[str, list[str]] = Backend.backend_capability
    return known.get(backend.lower()) or ["cpu"]
