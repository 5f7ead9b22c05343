"""Verdicts of the patches of NeMo-RL's Megatron worker on modules that they do not know."""

import importlib
import pkgutil
import sys
from types import CodeType, FunctionType, ModuleType

import pytest
from rigs.diagnosed_sources import each_source, verdict_of

import megapatch.patches.nemo_rl
from megapatch.patch import ABSENT, FIXED, NEEDED, UNKNOWN, UNSUPPORTED
from megapatch.patches.nemo_rl import (
    abort_resets_rerun,
    forward_pre_hook_after_split,
    open_step_guard,
    split_train_step,
    split_train_step_dtensor,
    split_train_step_policy,
    sync_weights_version,
    train_after_exception,
)
from megapatch.patches.nemo_rl._workers import DTENSOR_WORKERS


def nvtx(function):
    """As NeMo-RL's: what is decorated is in a closure, and nothing says so."""

    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Release:
    def move_model(self, model, device): ...
    def use_reference_model(self): ...
    def prepare_for_lp_inference(self): ...
    def offload_before_refit(self): ...
    def offload_after_refit(self): ...
    def save_checkpoint(self, weights_path): ...
    def enable_forward_pre_hook(self): ...
    @nvtx
    def train(self, data, loss_fn):
        return self._first_train_step_forward_pre_hook_disabled


class Main(Release):
    def begin_train_step(self): ...
    def train_microbatch(self): ...
    @nvtx
    def finish_train_step(self): ...
    @nvtx
    def abort_train_step(self):
        self._train_step_state = None


class InPart(Release):
    def abort_train_step(self): ...


class HasNoHooks(Main):
    enable_forward_pre_hook = ...


class KnowsNoHooks(Main):
    @nvtx
    def train(self, data, loss_fn): ...


class HasNoSaves(Main):
    save_checkpoint = ...


class KnowsHooks(Main):
    @nvtx
    def finish_train_step(self):
        self._put_back()

    def _put_back(self):
        self._first_train_step_forward_pre_hook_disabled = False


class Resets(Main):
    @nvtx
    def abort_train_step(self):
        self.get_rerun_state_machine().state = None
        self.reset_model_temporary_tensors()


class ResetsInPart(Main):
    @nvtx
    def abort_train_step(self):
        self.get_rerun_state_machine().state = None


def refuses(self):
    return self._train_step_state


class Refuses(Main):
    pass


for name in ("prepare_for_lp_inference", *open_step_guard.LOSING):
    setattr(Refuses, name, nvtx(refuses))


def flat(cls):
    """With all of it in one class, as NeMo-RL's, but for names whose value is an ellipsis."""
    names = {k: v for one in reversed(cls.__mro__[:-1]) for k, v in vars(one).items()}
    return type("MegatronPolicyWorkerImpl", (), {k: v for k, v in names.items() if v is not ...})


def module(cls=None):
    found = ModuleType("made_up")
    names = dict.fromkeys((*split_train_step.CALLED, "get_model_config"), print)
    vars(found).update(names)
    if cls is not None:
        found.MegatronPolicyWorkerImpl = flat(cls)
    methods = {} if cls is not None else {"train": Release.train}  # a fork's actor class has them itself
    found.MegatronPolicyWorker = type("MegatronPolicyWorker", (), methods)
    return found


SPLIT, HOOK, ABORT, GUARD = split_train_step, forward_pre_hook_after_split, abort_resets_rerun, open_step_guard
CASES = [
    (SPLIT, Release, NEEDED, "has only train()"),
    (SPLIT, Main, FIXED, "has begin_train_step"),
    (SPLIT, InPart, UNKNOWN, "begin_train_step"),
    (HOOK, Release, ABSENT, "no finish_train_step of its own"),
    (HOOK, Main, NEEDED, "leaves the hooks off"),
    (HOOK, HasNoHooks, UNKNOWN, "enable_forward_pre_hook"),
    (HOOK, KnowsNoHooks, UNKNOWN, "forward_pre_hook_disabled in the methods of"),
    (HOOK, KnowsHooks, FIXED, "puts the hooks back"),
    (ABORT, Release, ABSENT, "no abort_train_step of its own"),
    (ABORT, InPart, UNKNOWN, "begin_train_step"),
    (ABORT, Main, NEEDED, "does not reset the rerun state machine"),
    (ABORT, Resets, FIXED, "mentions the rerun state machine"),
    (ABORT, ResetsInPart, NEEDED, "does not reset the routers' counts"),
    (
        GUARD,
        Release,
        NEEDED,
        "not refused while a train step is open: prepare_for_lp_inference, save_checkpoint, train",
    ),
    (GUARD, HasNoSaves, UNKNOWN, "save_checkpoint"),
    (GUARD, Refuses, FIXED, "the worker refuses them itself"),
]


@pytest.fixture
def verdict(monkeypatch):
    def diagnosed(patch, found):
        monkeypatch.setitem(sys.modules, found.__name__, found)
        return verdict_of(patch.diagnose, found)

    return diagnosed


@pytest.mark.parametrize(("patch", "cls", "kind", "reason"), CASES)
def test_it_says_what_it_found(verdict, patch, cls, kind, reason):
    found = verdict(patch, module(cls))
    assert (found.kind, reason in found.reason) == (kind, True), found


@pytest.mark.parametrize("patch", [SPLIT, HOOK, ABORT, GUARD])
def test_forks_are_not_supported(verdict, patch):
    found = verdict(patch, module())
    assert (found.kind, "trains with a fork of Megatron" in found.reason) == (UNSUPPORTED, True)
    assert verdict(patch, ModuleType("nothing")).kind is UNKNOWN


def test_a_function_that_a_split_step_calls_has_to_be_there(verdict):
    for name in split_train_step.CALLED:
        found = module(Release)
        delattr(found, name)
        refused = verdict(SPLIT, found)
        assert (refused.kind, refused.reason) == (UNKNOWN, f"expected but not found: made_up.{name}")


DATA_PLANE = """
class TQPolicy:
    def __init__(self): self.dp_client = self._router_replay_enabled = None
    def _stamp_pad_seqlen(self): ...
    def {packing}(self): ...
DP_TRAIN_FIELDS = fields_with_optional_routed_experts = ()
def shard_meta_for_dp({world}, batch_size, sequence_packing_args, dynamic_batching_args): ...
class TQWorkerMixin:
    def _fetch(self): ...
    def _attach_or_repack_pack_metadata(self): ...
    def {leader}(self): ...
"""


def data_plane(packing="_packing_args", world="dp_world", leader="_is_replica_leader"):
    return DATA_PLANE.format(packing=packing, world=world, leader=leader)


SOURCES = {
    split_train_step_policy.diagnose_tq_policy: {
        "policy: as known": (data_plane(), "needed", "only train_from_meta()"),
        "policy: no packing": (data_plane(packing="gone"), "unknown", "_packing_args"),
        "policy: another shard": (data_plane(world="gone"), "unknown", "parameter dp_world"),
    },
    split_train_step_policy.diagnose_mixin: {
        "mixin: as known": (data_plane(), "needed", "only train_presharded()"),
        "mixin: no leader": (data_plane(leader="gone"), "unknown", "_is_replica_leader"),
    },
}
NAMES = {
    "policy: as known": "but TQWorkerMixin _attach_or_repack_pack_metadata _fetch _is_replica_leader",
    "mixin: as known": "TQWorkerMixin _attach_or_repack_pack_metadata _fetch _is_replica_leader",
}
test_the_verdict_on_a_data_plane = each_source(SOURCES, NAMES)


SYNCHRONIZER = """
class WeightSynchronizer:
    {kind} sync_weights(self, {parameters}): ...
"""
DTENSOR = """
class DTensorPolicyWorkerImpl:
    def train(self, data, loss_fn):
        self.dp_mesh, self.dp_size, self.max_grad_norm, self.scheduler
        self.optimizer.zero_grad()
        self.optimizer.{step}()
    {more}
class DTensorPolicyWorker(DTensorPolicyWorkerImpl): ...
class BatchedDataDict:
    from_batches = get_batch = select_indices = {slice} = None
"""
TIMER = """
class Timer:
    def __init__(self): self.{times} = {{}}
    def start(self, label):
        if label in self.{times}: {again}
        self.{times}[label] = 0.0
"""


def synchronizer(parameters="timer", kind="def"):
    return sync_weights_version.MODULE, SYNCHRONIZER.format(kind=kind, parameters=parameters)


def dtensor(step="step", more="", slice_="slice"):
    return next(iter(DTENSOR_WORKERS)), DTENSOR.format(step=step, more=more, slice=slice_)


def timer(times="_start_times", again="raise ValueError"):
    return train_after_exception.TIMER, TIMER.format(times=times, again=again)


SYNC, WORKER, CLOCK = sync_weights_version, split_train_step_dtensor, train_after_exception
NAMED = [
    (SYNC.diagnose, synchronizer(), NEEDED, "takes no version"),
    (SYNC.diagnose, synchronizer("timer, version", "async def"), FIXED, "takes a version"),
    (SYNC.diagnose, synchronizer("clock"), UNKNOWN, "parameter timer"),
    (SYNC.diagnose, synchronizer(kind="async def"), UNKNOWN, "as a plain function"),
    (WORKER.diagnose, dtensor(), NEEDED, "has only train()"),
    (WORKER.diagnose, dtensor(step="gone"), UNKNOWN, "step in DTensorPolicyWorkerImpl.train"),
    (WORKER.diagnose, dtensor(slice_="gone"), UNKNOWN, "BatchedDataDict.slice"),
    (WORKER.diagnose, dtensor(more="def begin_train_step(self): ..."), UNKNOWN, "Impl.train_microbatch"),
    (CLOCK.diagnose_timer, timer(), NEEDED, "can never be started again"),
    (CLOCK.diagnose_timer, timer(again="pass"), FIXED, "can be started again"),
    (CLOCK.diagnose_timer, timer(times="_times"), UNKNOWN, "_start_times"),
]


@pytest.mark.parametrize(("diagnose", "source", "kind", "reason"), NAMED)
def test_the_verdict_on_a_module_that_is_known_by_its_name(monkeypatch, diagnose, source, kind, reason):
    name, code = source
    made_up = ModuleType(name)
    exec(code, vars(made_up))
    monkeypatch.setitem(sys.modules, name, made_up)
    found = verdict_of(diagnose, made_up)
    assert (found.kind, reason in found.reason) == (kind, True), found


def codes(function):
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        yield code
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def functions():
    package = megapatch.patches.nemo_rl
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        found = importlib.import_module(info.name)
        for value in vars(found).values():
            for function in [value, *vars(value).values()] if isinstance(value, type) else [value]:
                if isinstance(function, FunctionType) and function.__module__ == found.__name__:
                    yield function


def test_no_function_drags_torchs_configuration_along():
    """cloudpickle takes a function by value together with torch.distributed.config, which cannot be pickled, where
    the function mentions both names."""
    looked_at = 0
    for function in functions():
        looked_at += 1
        for code in codes(function):
            for package in ("distributed", "compiler", "_export", "fx"):
                assert not {package, "config"} <= set(code.co_names), f"{function.__qualname__}"
    assert looked_at > 50
