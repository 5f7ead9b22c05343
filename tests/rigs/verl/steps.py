"""One optimizer step of verl's engine from several calls, and TrainPump in front of it."""

import asyncio
import importlib

import torch

import megapatch
from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from rigs.megatron.gathers import wrong
from rigs.megatron.options import attempt
from rigs.verl.engine import GRADS, MICRO, batch_of, engine_of, loss, parameters, train

EXPECTED_TOKENS = 64
"""About those of a step: a power of two, by which a loss can be divided without rounding."""
SPLITS = ((4,), (1, 3), (2, 2), (1, 1, 1, 1))


def weighted(model_output, data, dp_group=None):
    """verl's own loss, which it divides by the tokens of the call, divided by those of a step instead."""
    found, metrics = loss()(model_output=model_output, data=data, dp_group=dp_group)
    return found * data["batch_num_tokens"] / EXPECTED_TOKENS, metrics


class EngineTrainer:
    """A rank's trainer, as TrainPump calls it: each `train_microbatch` is a call of verl's engine."""

    def __init__(self, engine):
        self.engine = engine
        self.step = megapatch.TrainStep(
            engine.module, engine.optimizer, calls_add_up=True, expected_count=EXPECTED_TOKENS
        )

    def begin_train_step(self):
        for chunk in self.engine.module:
            chunk.train()
        self.step.begin()

    def train_microbatch(self, samples):
        """Run forward and backward of a prompt group: a TensorDict of each sample."""
        data = importlib.import_module("verl.utils.tensordict_utils").concat_tensordict(samples)
        tokens = int(data["loss_mask"].values().sum())
        with self.step.accumulate(len(data) // MICRO, count=tokens):
            return self.engine.forward_backward_batch(data, weighted)

    def finish_train_step(self):
        self.step.reduce()
        return {"grad_norm": float(self.engine.optimizer_step()), "lr": self.engine.lr_scheduler_step()}

    def abort_train_step(self):
        self.step.abort()


def parts_of(step, split):
    """Cut a rank's samples of a step as they would arrive."""
    tensors = importlib.import_module("verl.utils.tensordict_utils")
    whole, first = batch_of(step), 0
    for size in split:
        yield tensors.index_select_tensor_dict(whole, list(range(first, first + size)))
        first += size


def steps(split, **options):
    """Two steps, each split so, in the way of docs/verl.md; return norms, and the parameters after them."""
    engine = engine_of(**options)
    step = megapatch.TrainStep(engine.module, engine.optimizer, calls_add_up=True, expected_count=EXPECTED_TOKENS)
    norms = []
    for number in range(2):
        with engine.train_mode(), step:
            for part in parts_of(number, split):
                tokens = int(part["loss_mask"].values().sum())
                with step.accumulate(len(part) // MICRO, count=tokens):
                    engine.forward_backward_batch(part, weighted)
            step.reduce()
            norms.append(float(engine.optimizer_step()))
        engine.lr_scheduler_step()
    return norms, parameters(engine)


def whole_steps(**options):
    """The same two steps by verl's own train_batch()."""
    engine = engine_of(**options)
    norms = [train(engine, step).get("metrics", {}).get("grad_norm") for step in range(2)]
    return norms, parameters(engine)


def cut_without(**options):
    """The second of two calls, without TrainStep; return the failure, or the gradient's norm."""
    engine = engine_of(**options)
    with engine.train_mode():
        engine.optimizer_zero_grad()

        def calls():
            for part in parts_of(0, (2, 2)):
                engine.forward_backward_batch(part, weighted)
            return float(engine.optimizer_step())

        return attempt(calls)


LAYOUTS = {
    "data parallel": {"overlap": GRADS},
    "pipeline": {"pp": 2},
    "virtual": {"pp": 2, "vpp": 2, "overlap": GRADS},
}


def cells(rank, world_size):
    for name, layout in LAYOUTS.items():
        yield (name, "whole"), lambda layout=layout: whole_steps(**layout)
        for split in SPLITS:
            if name == "virtual" and any(size % 2 for size in split):
                continue  # Megatron's interleaved schedule takes multiples of the stages
            yield (name, split), lambda layout=layout, split=split: steps(split, **layout)
    yield "without", lambda: cut_without(overlap=GRADS)
    yield "failed", failed_call
    yield "pump", pumped


def failed_call():
    """A call that fails leaves the next step, and the engine, as they would have been without it."""
    engine = engine_of(overlap=GRADS)
    trainer, hooks = EngineTrainer(engine), engine.tf_config.no_sync_func
    trainer.begin_train_step()
    (part,) = parts_of(0, (4,))
    part["temperature"] = torch.full((4,), float("nan"))
    failure = attempt(trainer.train_microbatch, [part])
    train(engine, 0)
    expected = engine_of(overlap=GRADS)
    train(expected, 0)
    return failure[0], engine.tf_config.no_sync_func is hooks, wrong(parameters(engine), parameters(expected))


class Generation:
    """The generating engine, which is given the weights, and the logger. Notes its calls."""

    def __init__(self, engine):
        self.engine, self.calls, self.norms, self.weights = engine, [], [], None

    async def pause_generation(self):
        self.calls.append("pause")

    async def resume_generation(self):
        self.calls.append("resume")

    def set_weight_version(self, version):
        self.calls.append(version)

    def log_metrics(self, metrics, step, prefix):
        if prefix == "train":
            self.norms.append(metrics["grad_norm"])

    def sync_weights(self):
        self.weights = parameters(self.engine)


def pumped():
    """Two steps by a TrainPump in each rank, of four prompt groups each; return what steps() does, what generation
    was asked, and how much of its weights is not the engine's."""
    engine = engine_of(**LAYOUTS["data parallel"])
    config = StreamingConfig(
        generations_per_prompt=1,
        min_prompt_groups_per_batch=4,
        target_prompt_groups_per_step=4,
        max_microbatches_in_flight=1,
        max_staleness=1,
    )
    buffer, generation = RolloutBuffer(max_prompt_groups=8), Generation(engine)
    pump = TrainPump(config, EngineTrainer(engine), buffer, generation, generation, logger=generation)

    async def main():
        await pump.sync_weights()
        for step in range(2):
            for index, part in enumerate(parts_of(step, (1, 1, 1, 1))):
                group = 4 * step + index
                await buffer.put((group, 0), {"group_id": group, "weight_version": step}, part)
            await pump.step()

    asyncio.run(main())
    return generation.norms, parameters(engine), generation.calls, wrong(generation.weights, parameters(engine))
