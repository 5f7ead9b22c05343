"""Make torch.cuda harmless, so that Megatron runs on a machine without a GPU.

Megatron asks torch.cuda for devices, streams, memory and random state in many places. The stubs answer for the
CPU: functions that move data do nothing, and the device is the CPU. The random state is the CPU generator's, so
Megatron's own random state tracker does its real work.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.utils._device

from ..errors import MisuseError

_lock = threading.Lock()
_replaced = False


def install_cuda_stubs() -> None:
    """Replace the parts of torch.cuda that Megatron uses, and make device="cuda" mean the CPU.

    Call it before the first import of megatron; a second call sets only the variables again that Megatron and
    torch.compile ask for. The replacements hold for the whole process, in every thread, and are never undone.

    Raises:
        MisuseError: megatron.core has been imported already, and its modules hold originals.
    """
    global _replaced
    with _lock:
        if _replaced:
            _set_variables()  # a rank that was forked with the stubs has variables of its own
            return
        if "megatron.core" in sys.modules:
            raise MisuseError(
                "install_cuda_stubs() must come before the first import of megatron: "
                "megatron.core is already imported and holds parts of the real torch.cuda"
            )
        _set_variables()
        _replace_torch_cuda()
        _replace_functions_that_take_a_device()
        _replaced = True


def _replace_functions_that_take_a_device() -> None:
    # Not a TorchFunctionMode: it would see every call of torch, and a step of a tiny model would take a fifth more
    # processor time. torch makes this list once, to know the functions in `with torch.device(...)`: it must find
    # the originals. The list is private to torch (seen in 2.13 to 2.15).
    factories = {*torch.utils._device._device_constructors(), torch.normal}
    for module in (torch, torch.fft, torch.nested):
        for name, function in list(vars(module).items()):
            if callable(function) and (function in factories or name.endswith("_like")):
                replacement = _on_cpu(function)
                replacement.__module__, replacement.__qualname__ = module.__name__, name  # pickle goes by these
                setattr(module, name, replacement)
    for name in dir(torch.Tensor):
        if name.startswith("new_"):
            setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for name, method in _tensor_methods().items():
        setattr(torch.Tensor, name, functools.wraps(getattr(torch.Tensor, name))(method))
    context = torch.utils._device.DeviceContext
    of_device = context.__init__
    context.__init__ = lambda self, device: of_device(self, "cpu" if _names_cuda(device) else device)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def patched_factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return patched_factory


def _tensor_methods() -> dict[str, Callable[..., Any]]:
    copy_to_cpu, convert, convert_type = torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.type

    def patched_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # From a GPU it returns a copy: Megatron offloads, then frees the original.
        return copy_to_cpu(self, *args, **kwargs).clone()

    def patched_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return convert(self, *("cpu" if _names_cuda(arg) else arg for arg in args), **kwargs)

    def patched_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The mixed-precision optimizers sort parameters by this name, and know only CUDA names.
        if not args and not kwargs:
            # Under a torch function mode torch finds this method by its name, and it is called within itself.
            return f"torch.cuda.{convert_type(self).removeprefix('torch.').removeprefix('cuda.')}"
        args = tuple(arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args)
        return convert_type(self, *args, **kwargs)

    def itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self

    return dict(
        cpu=patched_cpu,
        to=patched_to,
        type=patched_type,
        cuda=itself,
        pin_memory=_its_own(itself),
        record_stream=_its_own(_nothing),
    )


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


def _set_variables() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's jit_fuser is torch.compile, which needs a compiler
    os.environ.setdefault("NO_VCS_VERSION", "1")  # megatron.core would run git when it is imported
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists for tensor parallelism


def _replace_torch_cuda() -> None:
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
