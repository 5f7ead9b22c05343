"""Our own patches keep the contract, on the real code of the Megatron that is installed."""

from __future__ import annotations

import functools
import importlib
import inspect
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
from rigs.megatron import BOTH, GRADS, attempt, quick_writer
from rigs.slime import IMITATIONS, SlimeLoop
from rigs.slime_actor import REFERENCE, Actor
from torch.distributed import checkpoint

from megapatch._mcore.process_groups import process_groups
from megapatch.patch import NEEDED, Patch, Site, Verdict
from megapatch.patches import PATCHES
from megapatch.patches._diagnosis import missing_names
from megapatch.patches.megatron import torch_fsdp2_finalize
from megapatch.patches.megatron._schedules import one_microbatch
from megapatch.testing import MegatronLoop, check_contract, init_parallel, megatron_training_available, tiny_gpt


def auxiliary_loss_of_two_context_parallel_ranks():
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    parallel = importlib.import_module("megatron.core.parallel_state")
    init_parallel()
    loss = torch.ones(1, requires_grad=True)
    output = routers.MoEAuxLossAutoScaler.apply(torch.zeros(1, requires_grad=True), loss)
    routers.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([one_microbatch(schedules, 1, cp_size=2).scale]))
    config = SimpleNamespace(
        **dict.fromkeys(("timers", "grad_scale_func", "deallocate_pipeline_outputs")),
        num_moe_experts=2,
        calculate_per_token_loss=False,
    )
    before_0_16 = ["a model type"] if "model_type" in inspect.signature(schedules.backward_step).parameters else []
    with mock.patch.object(parallel, "get_context_parallel_world_size", return_value=2):
        schedules.backward_step([None], [output], [None], *before_0_16, config)
    assert loss.grad.item() == 2.0


def microbatch_without_tokens():
    init_parallel()
    model = tiny_gpt()
    model.forward_backward(microbatches=[torch.zeros(2, model.seq + 1, dtype=torch.int64)], masked=True)
    assert not any(gradient.any() for gradient in model.gradients().values())


def hooks_twice():
    init_parallel()
    ddp = tiny_gpt(**BOTH, hooks=True).chunks[0]
    for switch in (ddp.disable_forward_pre_hook, ddp.enable_forward_pre_hook):
        switch()
        switch()


def overwritten_checkpoint():
    reading = "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader"
    reader = importlib.import_module(reading).CachedMetadataFileSystemReader
    with tempfile.TemporaryDirectory() as folder:
        for key in ("first", "second"):
            checkpoint.save({key: torch.ones(1)}, checkpoint_id=folder, no_dist=True)
            assert list(reader(folder).read_metadata().state_dict_metadata) == [key]


def read_after_a_step():
    """By a method that one rank may call alone, and that therefore asks for a gather."""
    init_parallel()
    model = tiny_gpt(**BOTH)
    (ddp,) = model.chunks
    model.train_step()
    assert attempt(ddp.state_dict)[0] == "MisuseError"
    assert ddp.sharded_state_dict()
    assert ddp.state_dict()


def step_without_some_gradients():
    init_parallel()
    model = tiny_gpt(**GRADS)
    model.train_step(0)
    layer = model.chunks[0].module.decoder.layers[0]
    layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    model.train_step(1)


def one_call_after_two():
    """In steps whose gradients are finished after the calls."""
    init_parallel()
    model = tiny_gpt(**GRADS)
    if not hasattr(model.chunks[0].bucket_groups[0], "is_first_batch"):
        return  # up to 0.15 there can only be one
    model.config.finalize_model_grads_func = None
    for calls in (2, 1):
        model.zero_grad()
        for _ in range(calls):
            model.forward_backward()
        model.chunks[0].finish_grad_sync()


def no_sync_in_no_sync():
    init_parallel()
    ddp = tiny_gpt(**GRADS).chunks[0]
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not any(group.is_last_microbatch for group in ddp.bucket_groups)


def prepare_and_step():
    init_parallel()
    model = tiny_gpt(dtype="fp16")
    model.forward_backward()
    assert not model.optimizer.prepare_grads()
    norm = model.optimizer.get_grad_norm()
    assert model.optimizer.step()[:2] == (True, norm)


WITHOUT_FSDP = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)  # new name, old name


def reload_of_an_offloaded_parameter():
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    parameter, held = torch.ones(1), torch.zeros(1)
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_to_inner_param={parameter: held}),
        ddp_config=WITHOUT_FSDP,
        config=SimpleNamespace(
            use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True
        ),
    )
    module.DistributedOptimizer._copy_model_params_to_main_params(optimizer)
    assert torch.equal(held, parameter)


def loaded_state_of_an_offloaded_parameter():
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
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
    hybrid._sync_hdo_state_to_sub_optimizers()
    assert torch.equal(held, parameter)
    assert hybrid.state[parameter]["master_param"] is held
    optimizer = SimpleNamespace(
        optimizer=hybrid,
        ddp_config=WITHOUT_FSDP,
        model_param_group_index_map={"name": (0, 0)},
        config=SimpleNamespace(
            use_precision_aware_optimizer=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        ),
    )
    hybrid.param_groups = [{"params": [parameter]}]
    module.DistributedOptimizer._set_main_param_and_optimizer_states(
        optimizer, "name", tensors={"param": torch.full((1,), 2.0)}
    )
    assert parameter.item() == held.item() == 2.0


def layouts_in_turn():
    state = importlib.import_module("megatron.core.parallel_state")
    counts = []
    for _ in range(3):
        state.initialize_model_parallel()
        counts.append(len(process_groups()))
        state.destroy_model_parallel()
    assert counts[0] == counts[-1]


def gradients_of_fsdp2():
    package = importlib.import_module("megatron.core.distributed")
    fsdp2 = object.__new__(package.TorchFullyShardedDataParallel)
    if missing_names(torch_fsdp2_finalize.FINALIZE, torch_fsdp2_finalize.KEYWORD):
        fsdp2.finish_grad_sync()
    else:
        fsdp2.finish_grad_sync(force_all_reduce=False)


def idle_rerun_state():
    init_parallel()
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    assert machine.state_dict(None, "torch_dist") is not None
    validation = importlib.import_module("megatron.core.dist_checkpointing.validation")
    validation.maybe_report_missing_and_unexpected_keys({"rerun_state_machine_state"}, set())


def fault_that_went_away():
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine.state = rerun.RerunState.RERUNNING_IN_PLACE
    checkpoint, leave, _ = machine.should_checkpoint_and_exit()
    assert leave
    assert not checkpoint


def plan_twice():
    """Checkpoints are planned and not written: the writer of 0.12 does not work with every torch."""
    init_parallel()
    quick_writer()
    leaf = importlib.import_module("megatron.core.dist_checkpointing.mapping").ShardedObject
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy = module.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    kwargs = {"async_strategy": "mcore"} if hasattr(strategy, "_metadata_cache") else {}
    for keys in (["one"], ["one", "two"]):
        with tempfile.TemporaryDirectory() as folder:
            strategy.async_save({key: leaf(key, "data", (1,), (0,)) for key in keys}, folder, **kwargs)
        planned = [item.index.fqn for item in strategy.cached_local_plan.items]
        assert planned == [f"{key}/shard_0_1" for key in keys]


def strides_in_metadata():
    """As torch keeps them from 2.14 on."""
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    tensor = SimpleNamespace(dtype=torch.float32, strides=(1,))
    metadata = SimpleNamespace(
        state_dict_metadata={"key": module.TensorStorageMetadata(tensor, torch.Size([2]), [])}
    )
    strategy = object.__new__(module.TorchDistLoadShardedStrategy)
    assert list(strategy.load_tensors_metadata("", metadata)) == ["key"]


def train_twice():
    if megatron_training_available():
        init_parallel()
        loop = MegatronLoop(tiny_gpt(**GRADS))
        loop.train(1)
        loop.train(1)


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
    "megatron.aux-loss-over-context-parallel": auxiliary_loss_of_two_context_parallel_ranks,
    "megatron.forward-pre-hook": hooks_twice,
    "megatron.fresh-metadata": overwritten_checkpoint,
    "megatron.gathered-when-read": read_after_a_step,
    "megatron.grad-ready-window": one_call_after_two,
    "megatron.nested-no-sync": no_sync_in_no_sync,
    "megatron.parameters-without-gradients": step_without_some_gradients,
    "megatron.prepare-grads-once": prepare_and_step,
    "megatron.groups-destroyed": layouts_in_turn,
    "megatron.load-offloaded-state": loaded_state_of_an_offloaded_parameter,
    "megatron.reload-offloaded-params": reload_of_an_offloaded_parameter,
    "megatron.rerun-state-dict": idle_rerun_state,
    "megatron.rerun-transient-fault": fault_that_went_away,
    "megatron.save-plan-cache": plan_twice,
    "megatron.strict-loads-with-new-torch": strides_in_metadata,
    "megatron.torch-fsdp2-finalize": gradients_of_fsdp2,
    "megatron.train-reentry": train_twice,
    "megatron.zero-tokens": microbatch_without_tokens,
    "slime.first-sync-pushes-actor": sync_with_reference,
    "slime.train-reentry": two_rollouts,
}


def test_every_patch_keeps_the_contract(monkeypatch):
    monkeypatch.syspath_prepend(str(IMITATIONS))
    # SkyRL's and NeMo-RL's are in patches/skyrl/test_contract.py and patches/nemo_rl/test_contract.py.
    here = [patch for patch in PATCHES if patch.family in ("megatron", "slime")]
    check_contract({**{patch: SCENARIOS[patch.name] for patch in here}, SHADOWED: finalize_nothing})
