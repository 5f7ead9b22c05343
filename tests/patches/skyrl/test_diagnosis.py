"""Verdicts on code that is like SkyRL's and yet another."""

from rigs.diagnosed_sources import each_source

from megapatch.patches.skyrl import (
    accumulate_forward_backward,
    async_trainer_resume,
    grad_scale,
    pause_rollback,
    pipeline_seed,
    weight_sync_pause,
)

DISPATCH = """
class WorkerDispatch:
    async def save_weights_for_sampler(self):
        if self.colocate_all:
            return
{body}
"""
BROADCAST = "self.broadcast_to_inference_engines(self._inference_engine_client)"
PAUSE = "await self._inference_engine_client.pause_generation()"
RESUME = "await self._inference_engine_client.resume_generation()"
TRAINER = """
class FullyAsyncRayPPOTrainer:
    async def train(self):
{body}
    async def async_sync_policy_weights_to_inference_engines(self):
        await self.policy.broadcast(self.{client})
"""
SYNC = "await self.async_sync_policy_weights_to_inference_engines()"
CLIENT = """
class InferenceEngineClient:
    def __init__(self):
        self.generation_paused_event = Event()
    async def pause_generation(self):
        "May mention that resume_generation() is to clear it."
{body}
"""
LOOK = "if self.generation_paused_event.is_set(): raise RuntimeError"
SET = "self.generation_paused_event.set()"


def code(template, *lines, **names):
    return template.format(body="\n".join(f"        {line}" for line in lines), **names)


def in_finally(*lines, last):
    return ("try:", *(f"    {line}" for line in lines), "finally:", f"    {last}")


def trainer(*lines, client="inference_engine_client"):
    return code(TRAINER, *lines, client=client)


TAKEN_BACK = ("try: await abort()", "except BaseException: self.generation_paused_event.clear(); raise")
BY_DISPATCH = "await self.dispatch.save_weights_for_sampler()"
ITS_SYNCS = "expected train() to use"
WORKER = """
class MegatronModelWrapper:
    def forward_backward_mini_batch(self, micro_batches): ...
class MegatronPolicyWorkerBase:
    def forward_backward(self, data):
        {before}
        self.actor_module, self.model.forward_backward_mini_batch(data)
    def optim_step(self):
        self.strategy.optimizer_step(self.optimizer)
        {after}
    def offload_to_cpu(self, {offload}="offload_optimizer"): ...
"""
ZERO = "self.actor_module.zero_grad_buffer()"
WRAPPER = """
def get_model_config(model): ...
class MegatronModelWrapper:
    def __init__(self, actor_module, {optimizer}):
        config = get_model_config(actor_module)
        config.finalize_model_grads_func = "actor_optimizer"
        {body}
"""
STRATEGY = """
class MegatronStrategy:
    def set_seed(self, seed):
        torch.manual_seed(seed {own_offset})
    def setup_distributed(self):
        initialize_model_parallel()
        self.{sets}(self.seed {offset})
"""
BY_STAGE = "+ 100 * get_pipeline_model_parallel_rank()"


def worker(before="pass", after="pass", offload="offload_optimizer"):
    return WORKER.format(before=before, after=after, offload=offload)


def strategy(own_offset="", offset="", sets="set_seed"):
    return STRATEGY.format(own_offset=own_offset, offset=offset, sets=sets)


SOURCES = {
    accumulate_forward_backward.diagnose: {
        "worker: zeroes before": (worker(before=ZERO), "needed", "zeroes the gradients of those before it"),
        "worker: zeroes after": (worker(after=ZERO), "fixed", "forward_backward does not"),
        "worker: zeroes both times": (worker(before=ZERO, after=ZERO), "needed", "zeroes the gradients"),
        "worker: never zeroes": (worker(), "unknown", "zero_grad_buffer in"),
        "worker: another offload": (worker(before=ZERO, offload="gone"), "unknown", "parameter offload_optimizer"),
    },
    grad_scale.diagnose: {
        "wrapper: no scale": (
            WRAPPER.format(optimizer="actor_optimizer", body="pass"),
            "needed",
            "leaves grad_scale_func unset",
        ),
        "wrapper: scale": (
            WRAPPER.format(optimizer="actor_optimizer", body="config.grad_scale_func = print"),
            "fixed",
            "sets grad_scale_func",
        ),
        "wrapper: no optimizer": (
            WRAPPER.format(optimizer="gone", body="pass"),
            "unknown",
            "parameter actor_optimizer",
        ),
    },
    pipeline_seed.diagnose: {
        "strategy: one seed": (strategy(), "needed", "the same seed"),
        "strategy: a seed by stage": (strategy(offset=BY_STAGE), "fixed", "depends on the pipeline stage"),
        "strategy: sets it by stage": (strategy(own_offset=BY_STAGE), "fixed", "depends on the pipeline stage"),
        "strategy: seeds otherwise": (strategy(sets="seed_all"), "unknown", "set_seed in"),
    },
    weight_sync_pause.diagnose: {
        "dispatch: no pause": (code(DISPATCH, BROADCAST), "needed", "while engines serve"),
        "dispatch: another": (code(DISPATCH, "self.send()"), "unknown", "_inference_engine_client in"),
        "dispatch: fixed": (
            code(DISPATCH, PAUSE, *in_finally(BROADCAST, last=RESUME)),
            "fixed",
            "even after a failure",
        ),
        # as in PR 1212 before its review
        "dispatch: no finally": (code(DISPATCH, PAUSE, BROADCAST, RESUME), "unknown", "even after a failure"),
        "dispatch: no resume": (code(DISPATCH, PAUSE, BROADCAST), "unknown", "even after a failure"),
    },
    async_trainer_resume.diagnose: {
        "trainer: no finally": (trainer(SYNC, PAUSE, SYNC, RESUME), "needed", "does not resume"),
        "trainer: no client": (
            trainer(SYNC, PAUSE, SYNC, RESUME, client="engines"),
            "unknown",
            "engine_client in",
        ),
        "trainer: finally": (trainer(SYNC, PAUSE, *in_finally(SYNC, last=RESUME)), "unknown", ITS_SYNCS),
        "trainer: no first sync": (trainer(PAUSE, SYNC, RESUME), "unknown", ITS_SYNCS),
        "trainer: by the dispatch": (trainer(BY_DISPATCH, client="engines"), "fixed", "WorkerDispatch"),
    },
    pause_rollback.diagnose: {
        "client: set for good": (code(CLIENT, LOOK, SET, "await abort()"), "needed", "leaves"),
        "client: taken back": (code(CLIENT, LOOK, SET, *TAKEN_BACK), "fixed", "clears its own mark"),
        "client: another mark": (
            code(CLIENT, LOOK, SET).replace("_event = Event()", "_mark = Event()"),
            "unknown",
            "generation_paused_event in",
        ),
        "client: no mark": (
            code(CLIENT, "await abort()").replace("self.generation_paused_event = Event()", "pass"),
            "absent",
            "does not mark itself",
        ),
    },
}
NAMES = {
    "worker: zeroes before": "but data strategy",
    "wrapper: no scale": "but config model",
    "strategy: one seed": "but torch",
    "dispatch: no pause": "WorkerDispatch _inference_engine_client broadcast_to_inference_engines colocate_all "
    "save_weights_for_sampler",
    "trainer: no finally": "but _inference_engine_client broadcast policy",
    "client: set for good": "InferenceEngineClient __init__ generation_paused_event is_set pause_generation",
}
test_the_verdict = each_source(SOURCES, NAMES)
