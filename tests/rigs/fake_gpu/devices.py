"""Devices of tensors on the fake GPU. torch keeps all memory on the CPU; a note in each storage says whose it is.

Like the CUDA stubs, on which this stands, it replaces functions of torch for the whole process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types

import torch
from torch.utils._pytree import tree_flatten

from megapatch._verify.operations import Operations
from megapatch.testing import _cuda_stubs

from . import streams
from .memory import memory_of, put_on_gpu

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
MAY_MIX = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
"""Operators that copy between devices, or take indices from the host."""

_of_host = set()  # names of process groups that were made for the host


class MixedDevices(RuntimeError):
    """An operation or a collective got a tensor of the wrong device."""


class FakeGPU(Operations):
    """Watches all operations of this thread, and of its backward passes."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema, leaves = function._schema, tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if memory_of(tensor) is not None]
        if schema.name.startswith("c10d::"):
            of_host = is_of_host(next(filter(_is_group, leaves), None))
            written = on_gpu
            if schema.name != "c10d::barrier" and not of_host:
                check_collective(schema.name, tensors)
        else:
            if schema.name not in MAY_MIX:
                _check_mixed(schema.name, tensors, on_gpu)
            written = [tensor for tensor in _written(schema, args, kwargs or {}) if memory_of(tensor) is not None]
        if on_gpu and not _is_view(schema):
            streams.look(on_gpu, written, schema.name)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if on_gpu and (schema.name not in MAY_MIX or tensors[0] is on_gpu[0]):
            when = streams.current_stream().tick()
            for made in tree_flatten(result)[0]:
                if isinstance(made, torch.Tensor) and memory_of(made) is None:
                    streams.write(put_on_gpu(made), streams.current_stream(), when)
        return result

    def _note(self, name, leaves, ranks=None):
        super()._note(name, leaves, ranks)
        if self.found[-1].is_wait:
            self.lines.append(_line())

    @contextlib.contextmanager
    def waits_by_line(self):
        """Yield a Counter, filled at the end, of (file, line, source) of the waits of the host."""
        before, found = len(self.lines), collections.Counter()
        try:
            yield found
        finally:
            found.update(self.lines[before:])


def check_collective(name, tensors):
    """Raise MixedDevices for a tensor of the host, which NCCL would refuse."""
    for tensor in tensors:
        if tensor.numel() and memory_of(tensor) is None:
            raise MixedDevices(f"{name} got a tensor of the host, of {tuple(tensor.shape)}")


def is_of_host(group):
    if isinstance(group, torch.ScriptObject):
        group = torch.distributed.ProcessGroup.unbox(group)
    return group is not None and group.group_name in _of_host


def _is_group(value):
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"


def _is_view(schema):
    """Return whether an operator touches no memory."""
    return any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns)


def _check_mixed(name, tensors, on_gpu):
    # Autograd makes empty tensors by itself, which nobody notes.
    others = [tensor for tensor in tensors if tensor.ndim and tensor.numel() and memory_of(tensor) is None]
    if others and on_gpu:
        shapes = [tuple(tensor.shape) for tensor in others]
        raise MixedDevices(f"{name} got tensors of the GPU, and some of the host, of {shapes}")


def _written(schema, args, kwargs):
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)
    for argument in schema.arguments[len(args) :]:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
            yield from _tensors(kwargs[argument.name])


def _tensors(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _line():
    """Return (file, line) of the innermost code that is neither torch's nor the rig's."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "/fake_gpu/" not in path and not path.endswith("_verify/operations.py"):
            return path, frame.f_lineno
        frame = frame.f_back
    return "", 0


# ------------------------------------------------------------------------ torch's functions
def give_devices():
    """Have torch's functions put tensors on the fake GPU, in this process."""
    names_cuda = _cuda_stubs._names_cuda
    _cuda_stubs._names_cuda = lambda value: _is_index(value) or names_cuda(value)
    factories = {*torch.utils._device._device_constructors(), torch.normal}
    for module in (torch, torch.Tensor):
        for name, function in list(vars(module).items()):
            original = getattr(function, "__wrapped__", None)
            if original in factories or (original and name.startswith("new_")) or name.endswith("_like"):
                setattr(module, name, _placing(function))
    torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu = _to(torch.Tensor.to), _cuda, _cpu
    torch.Tensor.device = property(lambda self: HOST if memory_of(self) is None else DEVICE)
    torch.Tensor.is_cuda = property(lambda self: memory_of(self) is not None)
    torch.nn.Module.cuda = _module_to_gpu
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor"):
        setattr(torch.cuda, name, _TensorType(name, (), {"of_host": getattr(torch, name)}))
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.accelerator.is_available = lambda: False  # with it torch's optimizers ask the driver
    _give_backend()


def _give_backend():
    """Have process groups stand for NCCL's, unless they are made for the host."""
    from torch.distributed import distributed_c10d

    def new_group(*args, **kwargs):
        group = original(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and isinstance(group, torch.distributed.ProcessGroup):
            _of_host.add(group.group_name)
        return group

    original, get_backend = distributed_c10d.new_group, torch.distributed.ProcessGroup._get_backend
    for module in (torch.distributed, distributed_c10d):
        module.new_group = functools.wraps(original)(new_group)
        module.get_backend = lambda group=None: "gloo" if is_of_host(group) else "nccl"
    distributed_c10d._get_object_coll_device = lambda group=None: "cpu" if is_of_host(group) else "cuda"
    torch.cuda.nccl.version = lambda: (2, 0, 0)  # torch asks for it where a collective raises
    torch.distributed.ProcessGroup._get_backend = lambda self, device: get_backend(self, HOST)


def _is_device(value):
    return isinstance(value, (str, torch.device)) or _is_index(value)


def _is_index(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _names_gpu(device):
    return device is not None and _cuda_stubs._names_cuda(device)


class _TensorType(type):
    """The metaclass of types such as torch.cuda.FloatTensor."""

    def __call__(cls, *args, **kwargs):
        return put_on_gpu(cls.of_host(*args, **kwargs))

    def __instancecheck__(cls, value):
        return isinstance(value, cls.of_host)


def _placing(function):
    @functools.wraps(function)
    def placing_function(*args, **kwargs):
        device = kwargs.get("device")
        made = function(*args, **kwargs)
        return put_on_gpu(made) if _names_gpu(device) else made

    # It is the stub's function, under the stub's name, for torch and pickle.
    code, closure = placing_function.__code__, placing_function.__closure__
    return types.FunctionType(code, globals(), function.__name__, None, closure)


def _to(convert):
    def patched_to(self, *args, **kwargs):
        devices = [arg for arg in (*args, kwargs.get("device")) if _is_device(arg)]
        others = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
        args = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
        kept = [arg for arg in args if not any(arg is device for device in devices)]
        converted = convert(self, *kept, **{name: value for name, value in kwargs.items() if name != "device"})
        for device in (*devices, *others):
            converted = _cuda(converted) if _names_gpu(device) else _cpu(converted)
        return converted

    return patched_to


def _cuda(self, *args, **kwargs):
    return self if memory_of(self) is not None else put_on_gpu(self.clone())


def _cpu(self, *args, **kwargs):
    """Copy to the host, which waits for it."""
    if memory_of(self) is None:
        return self
    return _ToHost.apply(self)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return _copy_on_host(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return _cuda(gradient)


def _copy_on_host(tensor):
    streams.look([tensor], [], "a copy to the host")
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


def _module_to_gpu(self, device=None):
    for tensor in (*self.parameters(), *self.buffers()):
        put_on_gpu(tensor)
    return self
