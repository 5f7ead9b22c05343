"""Reading parameters after an optimizer step returns that step's parameters, on every rank."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .._mcore.param_gathers import ddps_of, gather_params


class gathered_parameters:
    """Make a model's parameters those of the last optimizer step on this rank, before they are read.

        gathered_parameters(model)              # now, until the next optimizer step
        with gathered_parameters(model):        # the same
            export(model)

    With the distributed optimizer and overlap_param_gather, optimizer.step() leaves each data-parallel rank with
    its own new shard of the parameters beside the others' old ones, until the next forward pass gathers them.
    Code that reads the parameters before that, to save or to export them, reads a mixture.

    This makes pending gathers, with Megatron's own methods, and waits for gathers under way. Where nothing is
    pending it does nothing, and no collective runs: without overlap_param_gather, after a forward pass, and when
    called again. Megatron-FSDP and FSDP2 gather in their own exports: there is nothing to do for them.

    Call it on all ranks: the same gathers are pending on all ranks of a data-parallel group, and all of them have
    to make these. Call it where the parameters are read: in a generator after its first `next`, not when made.

    Args:
        model: a model, or a list of model chunks, wrapped in DistributedDataParallel or not. For a model that is
            not, the DistributedDataParallel around it is found.

    Raises:
        MisuseError: `model` is something else; or something is pending that cannot be gathered now, as its buffer
            is offloaded, with reuse_grad_buf_for_mxfp8_param_ag, and with a layer-wise optimizer. The message says
            how to avoid it. No collective has run by then.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        gather_params(ddps_of(model))

    def __enter__(self) -> Any:
        gather_params(ddps_of(self._model))  # made before an optimizer step, perhaps
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the parameters as they are: whole until the next optimizer step."""
