"""Engines, and a broadcast of weights to them, around SkyRL's own client, dispatch and trainer.

An engine serves one request all the time. The tests ask which weights a request was computed with.
"""

import asyncio
import importlib
import inspect
import logging
import os
from contextlib import contextmanager
from unittest import mock

import megapatch
from megapatch.weight_sync import _warned
from rigs.cells import take_rules
from rigs.releases import status_of

OLD, MIXED, NEW = ["old", "old"], ["new", "old"], ["new", "new"]
STEPS = 3  # of an epoch of the trainer


class BroadcastFailed(Exception): ...


class Engine:
    """An engine, whose weights come in two parts.

    failing   raised when it is asked to stop serving
    """

    def __init__(self, failing=None):
        self.failing, self.serving = failing, True
        self.weights, self.seen, self.calls = list(OLD), [], []

    def dp_size(self):
        return 1

    async def resume_generation(self):
        self.calls.append("resume")
        self.serving = True

    async def wake_up(self, tags):
        self.calls.append(f"wake up {tags}")

    def step(self, client):
        """Compute a token for the request unless it is held back."""
        event = getattr(client, "generation_paused_event", None)
        if event is not None and not event.is_set():
            self.serving = True
        if self.serving:
            self.seen.append(list(self.weights))

    async def abort_generation(self):  # up to skyrl 0.1.0; the client itself holds requests back until it resumes
        await self._stop("abort")

    async def pause_generation(self):  # skyrl 0.2.0
        await self._stop("pause")

    async def _stop(self, name):
        self.calls.append(name)
        await asyncio.sleep(0.001)
        if self.failing is not None:
            raise self.failing
        self.serving = False


class Engines(list):
    """Engines, the real client of a release, and broadcasts that may fail after the first part."""

    def __init__(self, release, *failing, grace=0):
        super().__init__(Engine(error) for error in (failing or (None, None)))
        self.module = importlib.import_module(f"{release.backend}.inference_engines.inference_engine_client")
        if hasattr(self.module, "ABORT_GENERATION_GRACE_PERIOD_SECONDS"):
            self.module.ABORT_GENERATION_GRACE_PERIOD_SECONDS = grace
        self.failing_broadcasts = ()  # counted from 1
        self.broadcasts = 0
        self.client = self._client()
        self.calls = self.client.calls = []

    def _client(self):
        config = mock.MagicMock()
        configs = {name: config for name in ("full_config", "lora_cfg", "inference_engine_cfg")}
        config.generator.enable_http_endpoint = config.enable_http_endpoint = False
        known = inspect.signature(self.module.InferenceEngineClient).parameters
        others = {name: value for name, value in {**configs, "model_path": "a model"}.items() if name in known}
        return _recording(self.module.InferenceEngineClient)(list(self), tokenizer=None, **others)

    @property
    def marked(self):
        """Whether the client is marked as paused; None if clients have no such mark."""
        event = getattr(self.client, "generation_paused_event", None)
        return None if event is None else event.is_set()

    @property
    def serving(self):
        for engine in self:
            engine.step(self.client)
        return [engine.serving for engine in self]

    def broadcast(self):
        """Broadcast at once, as ray.get() waits for it."""
        self.begin_broadcast()
        self.finish_broadcast()

    def begin_broadcast(self):
        self.calls.append("broadcast")
        self.broadcasts += 1
        for engine in self:
            engine.weights[0] = "new"
            engine.step(self.client)
        if self.broadcasts in self.failing_broadcasts:
            raise BroadcastFailed

    async def between(self):
        """Run while the broadcast is awaited."""
        await asyncio.sleep(0)

    def finish_broadcast(self):
        for engine in self:
            engine.weights[1] = "new"
            engine.step(self.client)

    def told(self):
        """Return the state after a scenario, as plain data."""
        return {
            "rules": take_rules(),
            "calls": [*self.calls],
            "engine calls": [engine.calls for engine in self],
            "seen mixed": any(MIXED in engine.seen for engine in self),
            "synced": all(engine.weights == NEW for engine in self),
            "marked": self.marked,
            "serving": self.serving,
        }


def _recording(base):
    class Client(base):
        """The real client, with its requests recorded in `calls`."""

        async def pause_generation(self):
            self.calls.append("pause")
            await super().pause_generation()

        async def resume_generation(self):
            self.calls.append("resume")
            await super().resume_generation()

    return Client


async def save_without_pause(self):
    """Imitate WorkerDispatch.save_weights_for_sampler as it was before the fix."""
    if self._inference_engine_client is None:
        raise RuntimeError("no inference_engine_client")
    self.prepare_for_weight_sync()
    if self.colocate_all:
        await self._inference_engine_client.wake_up(tags=["weights"])
    self.broadcast_to_inference_engines(self._inference_engine_client)
    self.finish_weight_sync()
    if self.colocate_all:
        await self._inference_engine_client.wake_up(tags=["kv_cache"])


def trainer_for(module, engines):
    """Return SkyRL's own trainer, for one epoch of some steps whose contents are left out."""

    class Trainer(module.FullyAsyncRayPPOTrainer):
        def __init__(self):  # the real one loads models
            self.cfg = mock.MagicMock()
            trainer = self.cfg.trainer
            trainer.epochs, trainer.update_ref_every_epoch = 1, False
            trainer.eval_interval = trainer.ckpt_interval = trainer.hf_save_interval = 0
            self.resume_mode = importlib.import_module(f"{module.__package__}.utils.trainer_utils").ResumeMode.NONE
            self.inference_engine_client = engines.client
            self.policy_model = mock.MagicMock(async_run_method=self.broadcast)
            self.num_steps_per_epoch = self.total_training_steps = STEPS
            self.mini_batch_size = self.num_parallel_generation_workers = 1
            self.max_staleness_steps, self.ref_model = 0, None
            self.async_train_dataloader = mock.AsyncMock()
            self.async_train_dataloader.get_consumed_uids_list = lambda: [0] * (self.global_step - 1)
            self._staleness_manager, self.tracker = mock.AsyncMock(), mock.MagicMock()
            self.all_timings, self.all_metrics = {}, {}

        def init_weight_sync_state(self):
            pass

        async def _run_generate_for_a_group_loop(self, buffer):
            for step in range(STEPS):
                await buffer.put(mock.MagicMock(uid=step))

        def convert_generation_group_mini_batch_to_training_input(self, groups):
            return groups

        async def _run_training(self, training_input):
            return {}

        async def broadcast(self, how, name, *args):
            assert name == "broadcast_to_inference_engines"
            await asyncio.sleep(0)
            engines.begin_broadcast()
            await engines.between()
            engines.finish_broadcast()

    return Trainer()


@contextmanager
def logged():
    """Collect the records of megapatch's logger but the audit's, as [(level, message)]."""
    _warned.clear()
    found = []
    handler = logging.Handler()
    handler.addFilter(lambda record: "audit" not in record.pathname.split(os.sep))
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    log = logging.getLogger("megapatch")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def outcome(coroutine):
    """Run the coroutine; return the error's name and text, or None."""
    try:
        asyncio.run(coroutine)
    except BaseException as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return None


async def cancelled_when(coroutine, ready):
    """Run it and cancel it as soon as `ready()`; a second time right after that."""
    task = asyncio.ensure_future(coroutine)
    while not ready():
        await asyncio.sleep(0)
        assert not task.done(), "it was over before it could be cancelled"
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await task


def without_and_with(patch, scenarios):
    """Return the patch's status, and the results of the scenarios without it and with it."""
    status = status_of(patch)
    megapatch.restore(patch)
    without = scenarios()
    megapatch.apply()
    return {"status": status, "without": without, "with": scenarios()}
