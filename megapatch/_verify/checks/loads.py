"""Loads into objects that have been used: the next steps are those of new objects that have loaded the same.

Optimizers whose state is on the CPU are the real classes, around one parameter that says it is on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ..check import DP, Check, Layout, expect, same, the_defect
from ._steps import ADAM, SHARDED

BRIDGE = "megatron.bridge.training.checkpointing"
MEGATRON = "megatron.training.checkpointing"
SCHEDULE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.0,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 20,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.0,
    "wd_incr_steps": 20,
    "wd_incr_style": "constant",
}


def read_back(state: Any) -> Any:
    """Return a state as Megatron's load() gives it, from a checkpoint of common state that is written for that."""
    import torch

    checkpointing = import_module("megatron.core.dist_checkpointing")
    of_shards = SimpleNamespace(
        can_handle_sharded_objects=True,
        check_backend_compatibility=lambda *_: None,
        check_version_compatibility=lambda *_: None,
        load=lambda *_: {},
    )
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    with tempfile.TemporaryDirectory(prefix="megapatch-verify-") as folder:
        torch.save(state, os.path.join(folder, "common.pt"))
        with open(os.path.join(folder, "metadata.json"), "w") as file:
            json.dump({"sharded_backend": "torch_dist", "common_backend": "torch", **versions}, file)
        return checkpointing.load({}, folder, sharded_strategy=of_shards)


def weights_alone(layout: Layout = DP) -> float:
    """Go back to a checkpoint's weights alone, and step on; the reference calls reload_model_params()."""
    layout.set_up()
    options = {**(SHARDED if layout is DP else {"lr": ADAM["lr"]}), "dtype": "bf16"}
    model, reference = layout.model(**options), layout.model(**options)
    saved = [{**chunk.state_dict()} for chunk in model.chunks]
    saved = [
        {name: getattr(value, "clone", lambda value=value: value)() for name, value in state.items()}
        for state in saved
    ]
    for trained in (model, reference):
        trained.train_step(0)
        for number, chunk in enumerate(trained.chunks):
            chunk.load_state_dict(read_back(dict(enumerate(saved)))[number])
    reference.optimizer.reload_model_params()
    for trained in (model, reference):
        trained.train_step(1)
    return same(model.parameters(), reference.parameters(), "parameters after weights were loaded")


def scheduler_goes_back(layout: Layout = DP) -> None:
    """Load an earlier state into a scheduler that has stepped on."""
    kind = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    scheduler = kind(SimpleNamespace(param_groups=[]), **SCHEDULE)
    scheduler.step(5)
    state = scheduler.state_dict()
    scheduler.step(3)
    for _ in range(2):
        scheduler.load_state_dict(state)
        expect(scheduler.num_steps == 5, f"step 5 is loaded, and the scheduler is at step {scheduler.num_steps}")


def rates_of_its_own(layout: Layout = DP) -> None:
    """Resume with another learning rate, which overrides the checkpoint's."""
    layout.set_up()
    saved = layout.model(lr=1.0).optimizer.state_dict()
    optimizer = layout.model(lr=0.5).optimizer
    kind = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    override = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    kind(optimizer, **{**SCHEDULE, "max_lr": 0.5, **override})
    with the_defect(ValueError, says="parameter group"):
        optimizer.load_state_dict(saved)
    rates = {group["max_lr"] for group in optimizer.param_groups}
    expect(rates == {0.5}, f"the learning rate is 0.5, and after a load {rates}")


def rates_of_each_group(layout: Layout = DP) -> None:
    """Load the state of groups that differ in nothing but their learning rates."""
    layout.set_up()
    saved, optimizer = (layout.model().optimizer for _ in range(2))
    for each in (saved, optimizer):
        for rate, group in enumerate(each.param_groups):
            group.update(wd_mult=1.0, max_lr=rate)
    with the_defect(ValueError, says="match the size"):
        optimizer.load_state_dict(saved.state_dict())
    rates = [group["max_lr"] for group in optimizer.param_groups]
    expect(rates == [*range(len(rates))], f"the groups' learning rates are {rates} after a load")


def streams_of_another(layout: Layout = DP) -> None:
    """Load the random streams of the first expert rank on the second one."""
    from ...patches.megatron import expert_streams_loaded as streams

    kind = import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    first, second = kind(), kind()
    for rank, tracker in enumerate((first, second)):
        tracker.add(streams.MODEL_PARALLEL, 2718)
        tracker.add(streams.EXPERTS, 1024 + 100 * rank)
    said = _Said()
    logger = logging.getLogger("megapatch")
    logger.addHandler(said)
    try:
        second.set_states(first.get_states())
    finally:
        logger.removeHandler(said)
    expect(said.has_warned, "an expert rank loads another one's random streams, and nothing says so")


def counters_of_bridge(layout: Layout = DP) -> None:
    """Begin loads of Megatron-Bridge's from a folder whose tracker is written between them."""
    import torch

    checkpointing = _imported(BRIDGE)
    if checkpointing is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        tracker = checkpointing.get_checkpoint_train_state_filename(folder, prefix="latest")
        for step in (2, 5):
            state = import_module("megatron.bridge.training.state").TrainState(step=step).state_dict()
            if torch.distributed.get_rank() == 0:
                torch.save(state, tracker)
            with contextlib.suppress(Exception):  # there is no model to load into
                checkpointing._load_checkpoint_from_path(folder, None, None, None, None)
            found = checkpointing.read_train_state(tracker).step  # by rank 0, for all
            expect(found == step, f"a load begins, and the tracker of step {step} is read as of step {found}")


def start_from_pretrained(layout: Layout = DP) -> None:
    """Begin a load where only the pretrained checkpoint is there, and then one from the job's own."""
    for checkpointing, begin, settings in _loaders():
        begin(settings)
        _write_tracker(checkpointing, settings.load)
        begin(settings)
        expect(
            settings.finetune is False, "a start from a pretrained checkpoint sets finetune for all later loads"
        )


def start_from_recovery(layout: Layout = DP) -> None:
    """Begin a load where a pretrained checkpoint is there, and one for recovery."""
    for checkpointing, begin, settings in _loaders():
        settings.non_persistent_ckpt_type = "global"
        _write_tracker(checkpointing, os.path.join(settings.load, "non_persistent"))
        begin(settings)
        expect(settings.finetune is False, "a job starts from the pretrained checkpoint, and not from its own")


def newer_recovery(layout: Layout = DP) -> None:
    """Ask for step 2 where a checkpoint for recovery is of step 4."""
    from ..._python.dotted import temporarily_set

    for checkpointing, _, settings in _loaders():
        settings.ckpt_step, settings.non_persistent_ckpt_type = 2, "global"
        taken: list[Any] = []
        found = {
            "_load_non_persistent_base_checkpoint": lambda *args, taken=taken, **kwargs: taken.append(args),
            "file_exists": lambda path: "non_persistent" in path,
            "read_train_state": lambda path: SimpleNamespace(step=4),
        }
        _write_tracker(checkpointing, os.path.join(settings.load, "non_persistent"), 4)
        groups = {"pg_collection": None} if checkpointing.__name__ == BRIDGE else {}
        with temporarily_set(checkpointing, **found), contextlib.suppress(Exception):  # there is no step 2
            checkpointing._load_base_checkpoint(settings.load, settings, **groups)
        expect(not taken, "step 2 is asked for, and step 4 is loaded")


def _loaders() -> Iterator[tuple[Any, Callable[[Any], None], Any]]:
    """Yield Bridge's and Megatron's module, a function that begins a load, and settings of a load."""
    from ..._python.dotted import temporarily_set

    for name in (BRIDGE, MEGATRON):
        checkpointing = _imported(name)
        if checkpointing is None:
            continue  # wheels have Megatron's from 0.17 on

        def begin(settings: Any, name: str = name, checkpointing: Any = checkpointing) -> None:
            state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=settings))
            arguments: Any = (state, [], None, None) if name == BRIDGE else ([], None, None)
            stand_ins = {"get_args": lambda: settings} if name != BRIDGE else {}
            with temporarily_set(checkpointing, **stand_ins), contextlib.suppress(Exception):
                checkpointing.load_checkpoint(*arguments)  # there is no model to load into

        with tempfile.TemporaryDirectory() as folder:
            settings = argparse.Namespace(
                load=os.path.join(folder, "run"), finetune=False, ckpt_format="torch_dist"
            )
            settings.pretrained_checkpoint = os.path.join(folder, "pretrained")
            settings.non_persistent_ckpt_type = settings.non_persistent_global_ckpt_dir = None
            settings.exit_on_missing_checkpoint = False
            _write_tracker(checkpointing, settings.pretrained_checkpoint)
            yield checkpointing, begin, settings


def _write_tracker(checkpointing: Any, folder: str, step: int = 1) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(checkpointing.get_checkpoint_tracker_filename(folder), "w") as file:
        file.write(str(step))


def save_under_way(layout: Layout = DP) -> None:
    """Remove all checkpoints but the newest, which is being written: the tracker names the one before."""
    import torch

    checkpointing = _imported(MEGATRON) or _imported(BRIDGE)
    if checkpointing is None or torch.distributed.get_rank():
        return
    with tempfile.TemporaryDirectory() as folder:
        for step in "12":
            os.mkdir(os.path.join(folder, f"iter_{step:0>7}"))
        _write_tracker(checkpointing, folder)
        checkpointing.cleanup_old_non_persistent_checkpoint(folder)
        expect(len(os.listdir(folder)) == 3, "the last complete checkpoint is removed as a save begins")


def _imported(name: str) -> Any:
    """Return the module, or None where it is not installed, or lacks something that it imports."""
    with contextlib.suppress(ImportError):
        return import_module(name)
    return None


class _Said(logging.Handler):
    """Notes whether megapatch warns."""

    has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_warned = self.has_warned or record.levelno >= logging.WARNING


def in_place(layout: Layout = DP) -> float:
    """Go back to the second step of four with all that is saved, and step on; the reference has made two steps."""
    layout.set_up()
    rates = {**ADAM["optim"], "min_lr": 0.0}  # a schedule at another step has another rate
    options = {**(SHARDED if layout is DP else ADAM), "optim": rates, "dtype": "bf16"}
    (model, schedule), (reference, its_schedule) = (_with_schedule(layout.model(**options)) for _ in range(2))
    steps = (_stepper(model, schedule), _stepper(reference, its_schedule))
    for step in steps:
        step(0, 1)
    with tempfile.TemporaryDirectory() as folder, the_defect(KeyError, RuntimeError, says="step|view of a leaf"):
        file = os.path.join(folder, "parameters")  # of the distributed optimizer, which has them apart
        saved = copy.deepcopy(
            [*(chunk.state_dict() for chunk in model.chunks), model.optimizer.state_dict(), schedule.state_dict()]
        )
        if layout is DP:
            model.optimizer.save_parameter_state(file)
        steps[0](2, 3)
        for part, state in zip((*model.chunks, model.optimizer, schedule), saved, strict=True):
            part.load_state_dict(state)
        if layout is DP:
            model.optimizer.load_parameter_state(file)
    for step in steps:
        step(4, 5)
    return same(model.parameters(), reference.parameters(), "parameters after a load in place")


def _with_schedule(model: Any) -> tuple[Any, Any]:
    kind = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    return model, kind(model.optimizer, **{**SCHEDULE, "max_lr": ADAM["lr"]})


def _stepper(model: Any, schedule: Any) -> Callable[..., None]:
    def step(*steps: int) -> None:
        for each in steps:
            model.train_step(each)
            schedule.step(1)

    return step


DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
WITHOUT_FSDP = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)  # new name, old name


def reload_of_an_offloaded_parameter(layout: Layout = DP) -> None:
    """Load weights without optimizer state."""
    import torch

    module = import_module(DISTRIBUTED)
    parameter, held = torch.ones(1), torch.zeros(1)
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_to_inner_param={parameter: held}),
        ddp_config=WITHOUT_FSDP,
        config=SimpleNamespace(
            use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True
        ),
    )
    module.DistributedOptimizer._copy_model_params_to_main_params(optimizer)
    expect(torch.equal(held, parameter), "the next step puts back the weights from before the load")


def loaded_state_of_an_offloaded_parameter(layout: Layout = DP) -> None:
    """Load optimizer state."""
    import torch

    module = import_module(DISTRIBUTED)
    parameter, held = torch.ones(1), torch.zeros(1)
    hybrid = object.__new__(module.HybridDeviceOptimizer)
    vars(hybrid).update(
        param_to_inner_param={parameter: held},
        inner_param_to_orig_param={held: parameter},
        param_to_fp32_param={},
        param_update_in_fp32=True,
        defaults={"cpu_optimizer_cls": SimpleNamespace},
        state={parameter: {"master_param": torch.zeros(1), "step": torch.ones(())}},
        cpu_optimizers=[SimpleNamespace(param_groups=[{"params": [held]}], state={})],
        gpu_optimizer=None,
    )
    with the_defect(KeyError):
        hybrid._sync_hdo_state_to_sub_optimizers()
    expect(torch.equal(held, parameter), "the optimizer steps from a copy that the load has not reached")
    expect(hybrid.state[parameter]["master_param"] is held, "the optimizer has another main parameter")
    optimizer = SimpleNamespace(
        optimizer=hybrid,
        ddp_config=WITHOUT_FSDP,
        model_param_group_index_map={"name": (0, 0)},
        config=SimpleNamespace(
            use_precision_aware_optimizer=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        ),
    )
    hybrid.param_groups = [{"params": [parameter]}]
    with the_defect(KeyError):
        module.DistributedOptimizer._set_main_param_and_optimizer_states(
            optimizer, "name", tensors={"param": torch.full((1,), 2.0)}
        )
    expect(parameter.item() == held.item() == 2.0, "the load has not reached the copy")


CHECKS = (
    Check("megatron.override-after-load", rates_of_its_own),
    Check("megatron.rates-of-each-group", rates_of_each_group),
    Check(
        "megatron.main-params-after-load",
        weights_alone,
        "parameters of the step after a load, with reload_model_params()",
        layouts=True,
    ),
    Check("megatron.scheduler-after-load", scheduler_goes_back),
    Check("megatron.expert-streams-loaded", streams_of_another),
    Check("megatron.fresh-train-state", counters_of_bridge),
    Check("megatron.tracked-checkpoint-stays", save_under_way),
    Check("megatron.finetune-for-one-load", start_from_pretrained),
    Check("megatron.recovery-before-pretrained", start_from_recovery),
    Check("megatron.asked-step-loaded", newer_recovery),
    Check("load-in-place", in_place, "parameters, with those of a run that did not go back", layouts=True),
    Check("megatron.reload-offloaded-params", reload_of_an_offloaded_parameter),
    Check("megatron.load-offloaded-state", loaded_state_of_an_offloaded_parameter),
)
