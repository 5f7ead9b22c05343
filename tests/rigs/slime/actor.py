"""slime's MegatronTrainRayActor with a tiny GPT: its init() and update_weights(), down to what is sent.

Ours are its surroundings: process groups, arguments, checkpoints, Ray, and the rollout engines.
"""

import contextlib
import importlib
import inspect
from types import SimpleNamespace

import torch

from rigs.slime.train import CHECKOUT, UTILS, SlimeLoop

REFERENCE = 0.25
"""The value of every parameter of the reference model."""


class Actor:
    """An actor that has loaded the reference; `switches` are the models that it has switched to since."""

    def __init__(self, model, with_ref=True, **arguments):
        self.model, self.pushed, self.switches = model, [], []
        self.module = importlib.import_module(f"{UTILS}.actor")
        self.args = SlimeLoop(model, arguments={**ARGUMENTS, **arguments}).args
        kind = self._at_the_edges(self.module)
        layers = importlib.import_module("megatron.core.tensor_parallel.layers")
        for chunk in model.chunks:  # as megatron.training.get_model() does
            for param in chunk.parameters():
                layers.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        self.actor = object.__new__(kind)
        self.actor.init(self.args, "actor", with_ref=with_ref)
        self.actor.weight_updater._update_bucket_weights_from_distributed = self._receive
        engines = [[_Remote()], None, 1, [1], [0], [{}]]
        unpacked = inspect.unwrap(kind.update_weights).__code__.co_varnames
        if "engine_parallel_configs" not in unpacked:  # slime up to v0.2.4
            engines.pop()
        self.actor.rollout_manager = _Remote({"get_updatable_engines_and_lock": engines})

    def update_weights(self):
        self.pushed.append([])
        self.actor.update_weights()
        return self.pushed[-1]

    def _receive(self, named_tensors, *ignored, **also_ignored):
        self.pushed[-1].extend(tensor.detach().clone() for _, tensor in named_tensors)
        named_tensors.clear()

    def _load(self, model, *ignored, **also_ignored):
        with torch.no_grad():
            for chunk in model:
                for param in chunk.parameters():
                    param.fill_(REFERENCE)
        return 0, 0

    def _at_the_edges(self, module):
        """Put ours into slime's module, and return its actor, whose switches are counted."""
        module.initialize_model_and_optimizer = lambda *ignored: (self.model.chunks, self.model.optimizer, None, 7)
        module.load_checkpoint = self._load
        kind = module.MegatronTrainRayActor
        switches, switch = self.switches, kind._switch_model

        class Counted(kind):
            def _switch_model(self, target_tag):
                switches.append(target_tag)
                switch(self, target_tag)

            def sleep(self):
                pass

        if CHECKOUT:
            _replace_surroundings(module)
        return Counted


OFF = """
    colocate debug_rollout_only debug_train_only ci_test keep_old_actor no_load_optim no_load_rng finetune
    offload_train update_weight_delta use_critic use_fault_tolerance
"""
NONE = """
    custom_update_weight_post_write_path hf_checkpoint ckpt_step num_experts opd_teacher_ckpt_step
    opd_teacher_load ref_ckpt_step rollout_data_postprocess_path
"""
ARGUMENTS = {
    **dict.fromkeys(OFF.split(), False),
    **dict.fromkeys(NONE.split()),
    "distributed_timeout_minutes": 1,
    "enable_weights_backuper": True,
    "load": "actor",
    "megatron_to_hf_mode": "raw",
    "model_name": "tiny",
    "num_gpus_per_node": 1,
    "num_layers": 2,
    "ref_load": "reference",
    "train_memory_margin_bytes": 0,
    "update_weight_buffer_size": 1,
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
    "vocab_size": 32,
}


class _Remote:
    """A handle of a Ray actor, whose methods answer at once."""

    def __init__(self, answers=()):
        self._answers = dict(answers)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args, **kwargs: self._answers.get(name))


def _replace_surroundings(module):
    def nothing(*args, **kwargs):
        return None

    def start(self, args, role, *ignored, **also_ignored):
        self.args, self.role = args, role

    module.TrainRayActor.init = start
    distributed = importlib.import_module("slime.utils.distributed_utils")
    distributed.init_gloo_group()
    ray = SimpleNamespace(get=lambda answer: answer)
    pretrained = SimpleNamespace(from_pretrained=lambda *args, **kwargs: SimpleNamespace(quantization_config=None))
    names = ("monkey_patch_torch_dist", "register_default_process_group", "init", "clear_memory", "print_memory")
    names += ("is_megatron_main_rank", "reload_process_groups", "destroy_process_groups")
    surroundings = dict.fromkeys(names, nothing)
    surroundings["torch_memory_saver"] = SimpleNamespace(disable=contextlib.nullcontext)
    surroundings |= {"AutoConfig": pretrained, "AutoTokenizer": pretrained, "ray": ray}
    surroundings["TrainProfiler"] = lambda args: SimpleNamespace(on_init_end=nothing)
    for name in surroundings.keys() & vars(module).keys():
        setattr(module, name, surroundings[name])
    module.Timer().start_time.clear()  # another actor of this process has started them
    backups = importlib.import_module("slime.utils.tensor_backper")
    if hasattr(backups, "accelerator"):  # from v0.3.0 on
        backups.accelerator = SimpleNamespace(synchronize=nothing)
    updater = importlib.import_module(module.UpdateWeightFromDistributed.__module__)
    updater.ray = ray
    updater.connect_rollout_engines_from_distributed = nothing
    updater.convert_to_hf = lambda args, model_name, name, param, quantization: [(name, param)]
