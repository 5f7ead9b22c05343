"""The gradient of a step of a worker whose model FSDP2 has sharded: the sum of that of any number of calls.

FSDP2 gathers and reduces in every forward and backward pass, so all ranks have to make the same number of them: a
rank with fewer microbatches makes extra passes, whose loss does not count.

An exception leaves a pass half done. All ranks have to have left it in the same place, or their next collectives
do not match: if only one rank fails, the others wait, and the processes have to be ended.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ....errors import MisuseError


class Backward:
    """Takes the place of ``loss.backward()``.

    It is called `passes` times, which is the number of microbatches of the rank with the most of them. The
    loss of passes after a rank's own microbatches does not count.
    """

    def __init__(self, num_microbatches: int, passes: int) -> None:
        self.num_microbatches, self.passes = num_microbatches, passes
        self.made = 0

    def __call__(self, loss: Any) -> None:
        self.made += 1
        (loss * float(self.made <= self.num_microbatches)).backward()


class FSDP2Step:
    """The gradients of an open step.

    They are those of the optimizer's parameters: after a forward pass without a backward the module has gathered
    ones.
    """

    def __init__(self, worker: Any) -> None:
        self.model, self.optimizer, self.group = worker.model, worker.optimizer, worker.dp_mesh.get_group()

    def begin(self) -> None:
        self.model.set_requires_gradient_sync(True)  # else the optimizer would not see the gradient
        self.model.set_is_last_backward(True)
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int) -> Iterator[Backward]:
        """Wrap the passes of a call, whose losses go backward by the value of `as`."""
        torch = sys.modules["torch"]
        most = torch.tensor(num_microbatches, device="cuda")
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.group)
        backward = Backward(num_microbatches, int(most))
        yield backward
        if backward.made != backward.passes:
            raise MisuseError(
                f"train() made {backward.made} backward passes; expected {backward.passes}, as many as the rank "
                "with the most microbatches makes"
            )

    def end(self, factor: float) -> None:
        """Multiply the gradients, and let go of gathered parameters, which would be kept for the next step."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def abort(self) -> None:
        """Zero the gradients, and make the next pass a normal one, even if the last one was interrupted.

        Otherwise its gathered parameters stay, and the next backward pass takes itself for a part of the last one,
        so that some gradients are not reduced at all.

        Only FSDP2's own code describes its state: FSDPState in _fsdp_state.py of torch 2.13.0,
        https://github.com/pytorch/pytorch/tree/v2.13.0/torch/distributed/fsdp/_fully_shard
        """
        for parameter in self.model.parameters():  # the gathered ones too, with gradients until they are reduced
            parameter.grad = None
        self.optimizer.zero_grad()
        state = self.model._get_fsdp_state()
        if not getattr(state, "_is_root", True):  # no forward pass was ever made: there is nothing to reset
            return
        if hasattr(self.model, "reset_iter_state"):  # public, in torch 2.13
            self.model.reset_iter_state()
        else:  # as FSDP2 does at the end of each backward pass; without gradients it reduces nothing
            state._root_post_backward_final_callback()
            state._state_ctx.iter_forward_root = None  # older versions do this at the end of the forward pass
