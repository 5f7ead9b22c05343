"""A target with another body than the one that a patch knows is refused, with each Megatron."""

import importlib
import warnings
from types import ModuleType

import pytest
from rigs.chosen import chosen
from rigs.renames import another_body, edited, empty
from rigs.where import needs_megatron

from megapatch.patch import NEEDED, UNKNOWN
from megapatch.patches import PATCHES

BODY_DOES_NOT_MATTER = {
    "megatron.asked-step-loaded": ("_get_non_persistent_iteration",),
    "megatron.gathered-when-read": (
        "__init__",
        "start_param_sync",
        "broadcast_params",
        "save_checkpoint",
        "reshard_model_weights",
    ),
    "megatron.groups-destroyed": ("initialize_model_parallel",),
    "megatron.main-params-after-load": ("_copy_model_grads_to_main_grads", "prepare_grads", "load"),
    "megatron.override-after-load": ("load_state_dict", "__init__"),
    "megatron.parameters-without-gradients": ("start_grad_sync",),
    "megatron.recovery-before-pretrained": ("checkpoint_exists",),
    "megatron.rates-of-each-group": ("load_state_dict",),
    "megatron.prepare-grads-once": ("step_with_ready_grads", "zero_grad", "load_state_dict", "reset"),
    "megatron.save-fails-everywhere": ("save_config", "save_integrity_manifest"),
    "megatron.torch-fsdp2-finalize": ("finish_grad_sync",),
    "megatron.train-reentry": ("train_step",),
}
"""By patch, targets that it is only called by, whatever they do."""


def needed_sites():
    """Return (patch, site, module) of the sites in this Megatron that need their patch."""
    found = []
    for patch in chosen(PATCHES):
        for site in patch.sites:
            if patch.family == "megatron" and site.module.startswith(("megatron.core", "megatron.training")):
                try:
                    module = importlib.import_module(site.module)
                except ImportError:
                    continue
                if site.diagnose(module).kind is NEEDED:
                    found.append((patch, site, module))
    return found


@needs_megatron
@pytest.mark.every_patch("megatron")
def test_a_target_with_another_body_is_refused():
    warnings.simplefilter("ignore")  # of what is not installed, and of ranks that nothing is known of
    missed = []
    for patch, site, module in needed_sites():
        for path in site.replace:
            if path.rpartition(".")[2] not in BODY_DOES_NOT_MATTER.get(patch.name, ()):
                for edit in (empty, another_body):
                    with edited(module, path, edit) as changed:
                        if not changed or site.diagnose(module).kind is not UNKNOWN:
                            missed.append(f"{patch.name}, {path}, {edit.__name__}")
    assert not missed, "\n".join(missed)


@needs_megatron
@pytest.mark.every_patch("megatron")
def test_a_package_without_attributes_for_its_submodules_is_known(monkeypatch):
    """As one is that was imported again after Ctrl-C has ended its first import."""
    warnings.simplefilter("ignore")
    missed = []
    for patch, site, module in needed_sites():
        with monkeypatch.context() as patching:
            for name, value in [*vars(module).items()]:
                if isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}":
                    patching.delattr(module, name)
            verdict = site.diagnose(module)
        if verdict.kind is not NEEDED:
            missed.append(f"{patch.name}, {site.module}: {verdict.reason}")
    assert not missed, "\n".join(missed)
