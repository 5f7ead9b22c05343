"""A load of a model whose parameters are being gathered, or wait for that: what is loaded stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..._mcore.changes import Changes
from ..._mcore.param_gathers import ddps_left, finish_gathers, record_loaded


def load_over_gathers(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        ddps = [ddp for ddp in ddps_left(self) if ddp.ddp_config.overlap_param_gather]
        for ddp in ddps:
            finish_gathers(ddp)  # it would write over what is loaded
        changes = Changes(self.parameters() if ddps else ())
        result = load_state_dict(self, *args, **kwargs)
        for ddp in ddps:
            record_loaded(ddp, changes.made())
        return result

    return patched_load_state_dict
