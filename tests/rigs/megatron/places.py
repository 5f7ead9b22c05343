"""Without GPUs, tensors that say where they would be: for Megatron's HybridDeviceOptimizer, which asks them."""

import torch
from torch.overrides import TorchFunctionMode

IS_CUDA = torch.Tensor.is_cuda.__get__
KEEP_THE_PLACE = (torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.float, torch.Tensor.pin_memory)


class Gpu(TorchFunctionMode):
    """Lets tensors say that they are on a GPU, except what cpu() returns and what is made of that."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == IS_CUDA:
            return not getattr(args[0], "on_host", False)
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu or (func in KEEP_THE_PLACE and getattr(args[0], "on_host", False)):
            result.on_host = True
        return result
