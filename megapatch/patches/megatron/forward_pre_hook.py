"""Forward pre-hooks can be disabled and enabled in any order, any number of times.

Symptom   with --overlap-param-gather, a second disable_forward_pre_hook() raises KeyError with the model's
          repr as its message, a second enable_forward_pre_hook() a bare AssertionError. Megatron's train()
          disables them at entry and at exit, so a second train() in one process meets it; so does every
          framework that disables them around a checkpoint or a weight sync.
Upstream  unfixed in 0.12 to 0.19 and on main; met by slime, THUDM/slime#1779 and pull request #1857.
Seam      the two class attributes of DistributedDataParallel. Each chunk is handled by itself.
          Disabling while the hooks are off removes nothing; with param_sync=True it gathers the parameters
          of those bucket groups that have not dispatched their gather since the last step, and waits for
          gathers under way. Enabling while they are on does nothing. In all other cases the original runs.
          Patching train() instead would not be enough: frameworks call both methods themselves.
Limits    with reuse_grad_buf_for_mxfp8_param_ag, disabling while the hooks are off never gathers. Without
          overlap_param_gather both methods raise as before.
Cost      none in training; a repeated call is a loop over the bucket groups.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.bucket_groups import DDP, GROUP, MODULE, finish_param_gathers
from ..._mcore.known import arguments_of
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import ASSERTIONS, StandIn, expect_none, running, unmet


def diagnose(module: ModuleType) -> Verdict:
    """Call the real methods on a stand-in with one submodule, and again, where nothing is left to do."""
    expect_none(
        *unmet.names(f"{DDP}.__init__", "bucket_groups", "expert_parallel_bucket_groups", "use_forward_hook"),
        *unmet.names(f"{DDP}.__init__", "remove_forward_pre_hook_handles"),
        *unmet.names(f"{GROUP}.__init__", "param_gather_handle", "param_gather_dispatched"),
        *unmet.parameters(f"{GROUP}.finish_param_sync", "skip_next_bucket_dispatch"),
        *unmet.parameters(f"{DDP}.disable_forward_pre_hook", "param_sync"),
        *unmet.attributes(DDP, "enable_forward_pre_hook"),
    )
    ddp = module.DistributedDataParallel
    disable, enable = unpatched(ddp.disable_forward_pre_hook), unpatched(ddp.enable_forward_pre_hook)
    with running("disable_forward_pre_hook and enable_forward_pre_hook"):
        removed = not _hooked_after(disable, _stand_in(hooked=True))
        kept = _hooked_after(enable, _stand_in(hooked=False))
        disable_again = _error(disable, _stand_in(hooked=False))
        enable_again = _error(enable, _stand_in(hooked=True))
    expect_none(
        *([] if removed else ["handles removed by disable_forward_pre_hook"]),
        *([] if kept else ["handles kept by enable_forward_pre_hook"]),
    )
    if disable_again or enable_again:
        return Verdict(
            NEEDED,
            f"called again, disable_forward_pre_hook {disable_again or 'works'}, "
            f"enable_forward_pre_hook {enable_again or 'works'}",
        )
    return Verdict(FIXED, "both methods can be called again")


def disable_only_when_on(disable_forward_pre_hook: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(disable_forward_pre_hook)

    @functools.wraps(disable_forward_pre_hook)
    def patched_disable_forward_pre_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.remove_forward_pre_hook_handles or not self.use_forward_hook:
            return disable_forward_pre_hook(self, *args, **kwargs)
        if not (call := arguments_of(signature, (self, *args), kwargs)):
            return disable_forward_pre_hook(self, *args, **kwargs)
        if call.get("param_sync", True):
            finish_param_gathers(self)
        return None

    return patched_disable_forward_pre_hook


def enable_only_when_off(enable_forward_pre_hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enable_forward_pre_hook)
    def patched_enable_forward_pre_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.remove_forward_pre_hook_handles and self.use_forward_hook:
            return None
        return enable_forward_pre_hook(self, *args, **kwargs)

    return patched_enable_forward_pre_hook


def _stand_in(hooked: bool) -> StandIn:
    """Return just enough of a DistributedDataParallel for the two methods, with its hooks on or off."""
    handle = SimpleNamespace(remove=lambda: None)

    class Submodule:
        register_forward_pre_hook = staticmethod(lambda hook: handle)

    submodule = Submodule()
    return StandIn(
        ddp_config=StandIn(),
        use_forward_hook=True,
        module=SimpleNamespace(modules=lambda: [submodule]),
        remove_forward_pre_hook_handles={submodule: handle} if hooked else {},
        start_param_sync=lambda *args, **kwargs: None,
        _make_forward_pre_hook=lambda: None,
    )


def _hooked_after(method: Callable[..., Any], stand_in: StandIn) -> bool:
    method(stand_in)
    return bool(stand_in.remove_forward_pre_hook_handles)


def _error(method: Callable[..., Any], stand_in: StandIn) -> str:
    """Return the error that the method raises where nothing is left to do, in words; an empty text if it works."""
    try:
        method(stand_in)
    except (KeyError, *ASSERTIONS) as error:
        return f"raises {type(error).__name__}"
    return ""


PATCH = Patch(
    name="megatron.forward-pre-hook",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/pull/1857",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                "DistributedDataParallel.disable_forward_pre_hook": disable_only_when_on,
                "DistributedDataParallel.enable_forward_pre_hook": enable_only_when_off,
            },
        ),
    ),
)
