"""slime's RayTrainGroup of one rank, whose actor is in this process: calls of its handle are made at once.

The actor is slime's own, down to train_one_step(), with the data, the loss and the log of the tests.
"""

import importlib
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from rigs.slime.actor import ARGUMENTS, Actor
from rigs.slime.train import CHECKOUT, FRAMEWORK, UTILS, SlimeLoop

OF_TRAIN_ACTOR = {
    "compute_advantages_and_returns": False,
    "use_routing_replay": False,
    "ref_update_interval": None,
    "use_rollout_routing_replay": False,
}


class Loop(SlimeLoop):
    """Divides losses as slime does, by the samples of the step: here, by its microbatches."""

    def _loss(self, args, batch, num_microbatches, *rest, **ignored):
        loss, normalizer, log = super()._loss(args, batch, num_microbatches, *rest, **ignored)
        self.seen = [*getattr(self, "seen", ()), float(loss)]
        ranks = importlib.import_module("megatron.core.parallel_state").get_data_parallel_world_size()
        return loss * num_microbatches / self._global_batch_size() * ranks, normalizer, log


class Group:
    """Microbatches of a prompt group, as the real iterators give them out."""

    def __init__(self, microbatches):
        self.microbatches = microbatches

    def reset(self):
        self.left = iter(self.microbatches)

    def __next__(self):
        return next(self.left)


class Handle:
    """A Ray actor's handle: a call is made at once, and its result is taken by ray.get(), a stand-in here."""

    def __init__(self, rig):
        self.rig = rig
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *args: function(rig.actor, *args))
        self.update_weights = SimpleNamespace(remote=rig.update_weights)


def group_for(model, num_microbatches):
    """Return the actor's rig, the loop that has its surroundings, and its group."""
    if "ray" not in sys.modules and find_spec("ray") is None:
        sys.modules["ray"] = SimpleNamespace()
    importlib.import_module("ray").get = lambda results: results
    rig = Actor(model, with_ref=False)
    loop = Loop(model, num_microbatches=num_microbatches, arguments=ARGUMENTS | OF_TRAIN_ACTOR)
    loop._take_over()
    loop._fault, loop._microbatches, loop._done = None, 0, 0
    rig.actor.args, rig.actor.optimizer, rig.actor.opt_param_scheduler = loop.args, model.optimizer, loop
    quiet(rig)
    return rig, loop, group_of(rig)


def group_of(rig):
    """slime's RayTrainGroup, of this process's actor."""
    if not CHECKOUT:
        return SimpleNamespace(_actor_handlers=[Handle(rig)], update_weights=rig.update_weights)
    module = importlib.import_module(f"{FRAMEWORK}.ray.actor_group")
    module.ray = SimpleNamespace(get=lambda results: results)
    group = object.__new__(module.RayTrainGroup)
    group.args, group.role = rig.actor.args, "actor"
    group._actor_handlers = [Handle(rig)]
    return group


def quiet(rig):
    """Take the place of rollouts' data and of logs, in slime's module and its actor."""
    module = importlib.import_module(f"{UTILS}.actor")
    rig.actor._get_rollout_data = lambda group: {
        "group": group,
        "num_microbatches": [len(group)],
        "global_batch_sizes": [len(group)],
    }

    def get_data_iterator(*arguments):
        data = arguments[-1]
        iterators = [Group(data["group"]) for _ in rig.model.chunks]
        return (iterators, data["num_microbatches"]) if len(arguments) > 1 else iterators  # up to v0.2.4

    module.get_data_iterator = get_data_iterator
    if not CHECKOUT:
        return
    nothing = SimpleNamespace(__getattr__=None)
    for name in ("log_rollout_data", "log_perf_data", "save_debug_train_data"):
        for place in ("train_metric_utils", "train_data_utils", "train_dump_utils", None):
            target = module if place is None else getattr(module, place, nothing)
            if hasattr(target, name):
                setattr(target, name, lambda *args, **kwargs: None)
    rig.actor.prof = SimpleNamespace(step=lambda **ignored: None)
    rig.actor.rollout_data_postprocess = None
    rig.actor.weight_updater.pop_metrics = dict
