"""The schedules' functions with the right factor of a microbatch's losses, for releases with another one."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._mcore.known import CONFIG, is_a
from ..._python.dotted import temporarily_set
from ._schedules import PARALLEL, ROUTERS, SCALE


def count_one_token_at_least(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    config_of = _config_among(forward_step, skipped=1)

    @functools.wraps(forward_step)
    def patched_forward_step(forward_step_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        divides = is_a(config, CONFIG) and not config.calculate_per_token_loss
        function = _with_tokens(forward_step_func) if divides else forward_step_func
        return forward_step(function, *args, **kwargs)

    return patched_forward_step


def _with_tokens(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    def forward_step_with_tokens(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = forward_step_func(*args, **kwargs)

        def loss_with_tokens(*args: Any, **kwargs: Any) -> Any:
            found = loss_function(*args, **kwargs)
            if kwargs.get("non_loss_data") or len(found) != 3:
                return found
            loss, num_tokens, metrics = found
            return loss, num_tokens.clamp(min=1) if hasattr(num_tokens, "clamp") else max(num_tokens, 1), metrics

        return output, loss_with_tokens

    return forward_step_with_tokens


def scale_by_ranks(backward_step: Callable[..., Any], sizes: Mapping[bool, Sequence[str]]) -> Callable[..., Any]:
    """Let the scale of MoE's losses count ranks.

    Args:
        sizes: by calculate_per_token_loss, the functions of parallel_state whose results are multiplied.
    """
    routers, parallel = sys.modules[ROUTERS], sys.modules[PARALLEL]
    config_of = _config_among(backward_step)

    @functools.wraps(backward_step)
    def patched_backward_step(*args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        scale = routers.MoEAuxLossAutoScaler.main_loss_backward_scale
        if not isinstance(getattr(config, "num_moe_experts", None), int) or scale is None:
            return backward_step(*args, **kwargs)
        per_token = bool(getattr(config, "calculate_per_token_loss", False))
        size = math.prod(getattr(parallel, name)() for name in sizes[per_token])
        if size == 1:
            return backward_step(*args, **kwargs)
        with temporarily_set(routers.MoEAuxLossAutoScaler, **{SCALE: scale * size}):
            return backward_step(*args, **kwargs)

    return patched_backward_step


def _config_among(
    function: Callable[..., Any], skipped: int = 0
) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Return a function that finds `config` among a call's arguments, of which so many are left out at first."""
    place = list(inspect.signature(function).parameters).index("config") - skipped
    return lambda args, kwargs: kwargs.get("config", args[place] if len(args) > place else None)
