"""Make torch.cuda harmless, so that Megatron runs on a machine without a GPU.

Megatron asks torch.cuda for devices, streams, memory and random state in many places. The stubs answer for the
CPU: functions that move data do nothing, the device is the CPU, and the random state is the CPU generator's, so
that Megatron's own random state tracker does its real work.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

from ..errors import MisuseError

_lock = threading.Lock()
_replaced = False
_of_this_thread = threading.local()


def install_cuda_stubs() -> None:
    """Replace the parts of torch.cuda that Megatron uses, and make device="cuda" mean the CPU.

    Call it before the first import of megatron; a second call does nothing. The replacements hold for the whole
    process and are never undone. The meaning of "cuda" holds for the calling thread: call this again in other
    threads that create tensors.

    Raises:
        MisuseError: megatron.core has been imported already, and its modules hold originals.
    """
    global _replaced
    with _lock:
        if not _replaced:
            if "megatron.core" in sys.modules:
                raise MisuseError(
                    "install_cuda_stubs() must come before the first import of megatron: "
                    "megatron.core is already imported and holds parts of the real torch.cuda"
                )
            _replace_torch_cuda()
            _replaced = True
    if getattr(_of_this_thread, "mode", None) is None:
        _of_this_thread.mode = _CudaMeansCpu()
        _of_this_thread.mode.__enter__()  # and never left


_REWRITTEN = frozenset(
    getattr(torch.Tensor, name) for name in ("cuda", "cpu", "pin_memory", "record_stream", "to", "type")
)
"""The functions that `_CudaMeansCpu` asks for by name: any other is only rewritten for its keywords."""


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites calls of torch functions that name a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _REWRITTEN:
            return func(*args)
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cpu:  # from a GPU it returns a copy: Megatron offloads, then frees the original
            return func(*args, **kwargs).clone()
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
        elif func is torch.Tensor.type:
            # The mixed-precision optimizers sort parameters by this name, and know only CUDA names.
            if len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            args = tuple(arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args)
        return func(*args, **kwargs)


def _names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        value = value.type
    return isinstance(value, str) and value.startswith("cuda")


class _Idle:
    """A stream, an event or a context manager that has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing

    def record_event(self, *args: Any) -> _Idle:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Idle) -> float:
        return 0.0


def _its_own(stub: Any) -> Any:
    """Copy a function, because torch.compile refuses an object that has two names in torch."""
    if not isinstance(stub, FunctionType):
        return stub
    copied = FunctionType(stub.__code__, stub.__globals__, stub.__name__, stub.__defaults__, stub.__closure__)
    copied.__kwdefaults__ = stub.__kwdefaults__
    return copied


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_ONE_GIB = 1 << 30
_nothing = _always(None)


def _replace_torch_cuda() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's jit_fuser is torch.compile, which needs a compiler
    os.environ.setdefault("NO_VCS_VERSION", "1")  # megatron.core would run git when it is imported
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists for tensor parallelism
    import torch._dynamo  # it reads torch.cuda when it is imported, so import it first

    for name, stub in {**_devices(), **_streams(), **_memory(), **_random_state(), **_tensor_types()}.items():
        setattr(torch.cuda, name, _its_own(stub))
        if hasattr(torch.cuda.random, name):  # Megatron uses either path
            setattr(torch.cuda.random, name, _its_own(stub))
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _its_own(_nothing))
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.distributed.all_to_all_single = _with_split_sizes_as_lists(torch.distributed.all_to_all_single)


def _devices() -> dict[str, Any]:
    properties = SimpleNamespace(name="cpu", total_memory=_ONE_GIB, major=8, minor=0, multi_processor_count=1)
    return dict(
        is_available=_always(False),
        device_count=_always(1),
        current_device=_always("cpu"),
        set_device=_nothing,
        device=_Idle,
        get_device_name=_always("cpu"),
        get_device_properties=_always(properties),
        get_device_capability=_always((8, 0)),
        _lazy_init=_nothing,
    )


def _streams() -> dict[str, Any]:
    idle = _Idle()
    return dict(
        Stream=_Idle,
        Event=_Idle,
        stream=_Idle,
        current_stream=_always(idle),
        default_stream=_always(idle),
        set_stream=_nothing,
        synchronize=_nothing,
        is_current_stream_capturing=_always(False),
    )


def _memory() -> dict[str, Any]:
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return dict(
        {name: _always(0) for name in zero},
        memory_stats=_always({}),
        mem_get_info=_always((_ONE_GIB, _ONE_GIB)),
        reset_peak_memory_stats=_nothing,
        empty_cache=_nothing,
    )


def _random_state() -> dict[str, Any]:
    generator = torch.default_generator
    # _lazy_call and default_generators are private to torch.cuda (torch 2.13). Megatron's random state tracker
    # uses them in megatron/core/tensor_parallel/random.py (megatron-core 0.12 to 0.19).
    return dict(
        default_generators={"cpu": generator, 0: generator},
        _lazy_call=lambda callback, **kwargs: callback(),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda new_state, device=None: torch.set_rng_state(new_state),
        manual_seed=generator.manual_seed,
        manual_seed_all=_nothing,
        initial_seed=torch.initial_seed,
    )


def _tensor_types() -> dict[str, Any]:
    names = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor")
    return {name: getattr(torch, name) for name in names}


def _with_split_sizes_as_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Accept split sizes as tensors: Megatron's MoE leaves them so on the CPU, and torch takes only lists."""

    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def patched_all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return all_to_all_single(output, input, listed(output_split_sizes), listed(input_split_sizes), **kwargs)

    return patched_all_to_all_single
