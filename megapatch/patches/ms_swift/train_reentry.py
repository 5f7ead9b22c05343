"""ms-swift's Megatron trainer can be set up, and can train, more than once.

Symptom   with overlap_grad_reduce a second train(), or a second setup() of a Ray worker, dies on "When
          overlap_grad_reduce is True, config.no_sync_func must be None": the first has left its own no_sync there.
          Without that assertion, a second setup with overlap_param_gather silently trains from a mixture of new
          and old parameters, if steps before it were not finalized: it switches off the forward pre-hooks that
          would have gathered them.
Upstream  not reported; in 4.3.2 to 4.6.0.
Seam      the class attribute setup_model_training(), which train() and the Ray worker call. A no_sync_func that is
          a model chunk's own no_sync is removed before it (a user's meets ms-swift's assertion as before). If the
          trainer was set up before, reduces left under way are waited for, and parameters not gathered since the
          last step are gathered. megatron.forward-pre-hook makes switching the forward pre-hooks safe; this patch
          needs it.
Limits    train() continues until args.train_iters, which counts the steps of all calls: raise it before the next
          one. In releases up to 4.2 train() does all this itself: there the patch is unsupported.
          Under python -O, which removes the assertion, no_sync_func is replaced as without megapatch.
Numbers   change where a second setup found parameters that were not gathered, to those of a run without
          overlap_param_gather.
Cost      once a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, UNSUPPORTED, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, gone, running, unmet
from ..megatron._around_train import finish_earlier_call, is_own_no_sync

MODULE = "swift.megatron.trainers.base"
TRAINER = "BaseMegatronTrainer"
SETUP = "setup_model_training"

_set_up: weakref.WeakSet[Any] = weakref.WeakSet()
"""The trainers that were set up, and may have something to finish from then on."""


def diagnose(module: ModuleType) -> Verdict:
    """Call the real method twice on a stand-in of a trainer."""
    trainer = getattr(module, TRAINER, None)
    if trainer is None:
        return gone(TRAINER, module)
    path = f"{module.__name__}:{TRAINER}"
    if not hasattr(trainer, SETUP):
        expect_none(*unmet.names(f"{path}.train", "no_sync_func"))
        return Verdict(UNSUPPORTED, f"this version's train() sets the hooks itself; it has no {SETUP}()")
    expect_none(
        *unmet.attributes(f"{module.__name__}:", "DDP"),
        *unmet.names(f"{path}.{SETUP}", "wrapped_models", "config", "no_sync_func", "disable_forward_pre_hook"),
    )
    stand_in, setup = _stand_in(module.DDP), unpatched(getattr(trainer, SETUP))
    with running(SETUP):
        setup(stand_in)
        if not callable(stand_in.config.no_sync_func):
            return Verdict(UNKNOWN, f"expected {SETUP}() to set no_sync_func for overlap_grad_reduce")
        try:
            setup(stand_in)
        except AssertionError:
            return Verdict(NEEDED, f"with overlap_grad_reduce {SETUP}() fails at its second call")
    return Verdict(FIXED, f"{SETUP}() can be called again")


def _stand_in(ddp: type) -> StandIn:
    """Return just enough of a trainer with one model chunk."""
    methods = {"__init__": lambda self: None, "train": lambda self: None}
    hooks = dict.fromkeys(("no_sync_func", "grad_sync_func", "param_sync_func"))
    return StandIn(
        args=StandIn(overlap_grad_reduce=True),
        config=StandIn(**hooks),
        wrapped_models=[type("Chunk", (ddp,), methods)()],
        unwrapped_models=[],
        optimizer=SimpleNamespace(scale_loss=None),
        state=SimpleNamespace(iteration=0),
        call_event=lambda event: None,
    )


def make_repeatable(setup_model_training: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup_model_training)
    def patched_setup_model_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, found = self.config, self.config.no_sync_func
        if self in _set_up:
            finish_earlier_call(self.wrapped_models)
        _set_up.add(self)
        if is_own_no_sync(found, self.wrapped_models):
            config.no_sync_func = None
        try:
            return setup_model_training(self, *args, **kwargs)
        except BaseException:
            config.no_sync_func = config.no_sync_func or found
            raise

    return patched_setup_model_training


PATCH = Patch(
    name="ms_swift.train-reentry",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{TRAINER}.{SETUP}": make_repeatable}),),
    changes_numbers=True,
)
