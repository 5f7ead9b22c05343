"""Our own patches keep the contract, on the real code of the Megatron that is installed.

The scenarios of the patches of Megatron are those of `megapatch verify`, with a single rank.
"""

import functools
import importlib
from types import SimpleNamespace

from rigs.megatron.options import GRADS, quick_writer
from rigs.slime.actor import REFERENCE, Actor
from rigs.slime.train import IMITATIONS, SlimeLoop

from megapatch._verify.checks import CHECKS, checkpoints, loads
from megapatch.patch import NEEDED, Patch, Site, Verdict
from megapatch.patches import PATCHES
from megapatch.testing import check_contract, init_parallel, tiny_gpt


def plan_twice():
    """The writer of 0.12 does not work with every torch, so nothing is written."""
    quick_writer()
    checkpoints.structure_that_grows()


def two_rollouts():
    """Of the imitations of slime and miles."""
    init_parallel()
    loop = SlimeLoop(tiny_gpt(hooks=False, **GRADS))
    loop.train(1)
    loop.save()
    loop.train(1)


def sync_with_reference():
    """Of the imitation of slime."""
    init_parallel()
    pushed = Actor(tiny_gpt(layers=1)).update_weights()
    assert not any((tensor == REFERENCE).all() for tensor in pushed)


def start_with_peft():
    """Of the imitation of Bridge's setup, and of Megatron's load where wheels have it."""
    loads.start_from_pretrained()
    setup = importlib.import_module("megatron.bridge.training.setup")
    settings = SimpleNamespace(finetune=False, pretrained_checkpoint="")
    setup._create_peft_pre_wrap_hook(SimpleNamespace(checkpoint=settings), None)([])
    assert not settings.finetune


# ------------------------------------------------------------------------ a submodule that a function hides
def has_finalize(module):
    """Its package has a function of the module's name, which `import a.b as module` would give."""
    return Verdict(NEEDED, "it goes by its parameters") if callable(module.finalize_model_grads) else None


def accepts_no_chunk(finalize_model_grads):
    @functools.wraps(finalize_model_grads)
    def patched_finalize_model_grads(model, *args, **kwargs):
        return finalize_model_grads(model, *args, **kwargs) if model else "nothing to do"

    return patched_finalize_model_grads


def finalize_nothing():
    package = importlib.import_module("megatron.core.distributed")
    assert package.finalize_model_grads([]) == "nothing to do"


SHADOWED = Patch(
    name="test.shadowed",
    doc="A module that is hidden by a function is found.",
    upstream="https://example.com/1",
    sites=(
        Site(
            module="megatron.core.distributed.finalize_model_grads",
            diagnose=has_finalize,
            replace={"finalize_model_grads": accepts_no_chunk},
        ),
    ),
)

SCENARIOS = {
    **{check.name: check.scenario for check in CHECKS},
    "megatron.finetune-for-one-load": start_with_peft,
    "megatron.save-plan-cache": plan_twice,
    "slime.first-sync-pushes-actor": sync_with_reference,
    "slime.train-reentry": two_rollouts,
}


def test_every_patch_keeps_the_contract(monkeypatch):
    monkeypatch.syspath_prepend(str(IMITATIONS))
    # SkyRL's and NeMo-RL's are in patches/skyrl/test_contract.py and patches/nemo_rl/test_contract.py.
    here = [patch for patch in PATCHES if patch.family in ("megatron", "slime")]
    check_contract({**{patch: SCENARIOS[patch.name] for patch in here}, SHADOWED: finalize_nothing})
