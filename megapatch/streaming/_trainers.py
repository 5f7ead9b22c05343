"""Trainers of a pump: of one rank, made from a TrainStep, and Ray actors, one for each rank of a model."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._pausing.waiting import finished, tell_besides
from ..errors import MisuseError
from ._parts import Trainer

if TYPE_CHECKING:
    from ..train_step import StepResult, TrainStep


class StepTrainer:
    """A `Trainer` on one rank. All ranks of a model have to make each call, with the same data.

    A subclass may do more: keep the losses, refresh log-probs, sync weights.

    Args:
        step: a `megapatch.TrainStep` of this rank's model and optimizer.
        arguments: turns the data of a prompt group, or a list of such data if a microbatch call takes several
            groups, into the arguments of `TrainStep.forward_backward` on this rank. It chooses the rank's part of
            the data (by data parallel rank; tensor and pipeline parallel ranks get the same part) and the number
            of microbatches.
        increment: passed to `TrainStep.finish`: samples of an optimizer step, over all ranks.
    """

    def __init__(
        self, step: TrainStep, arguments: Callable[[Any], Mapping[str, Any]], increment: int | None = None
    ) -> None:
        self.step, self.arguments, self.increment = step, arguments, increment

    def begin_train_step(self) -> None:
        """Begin an optimizer step."""
        self.step.begin()

    def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one microbatch call.

        Args:
            data: the prompt group, or a list of them, as it comes from the buffer; `arguments` gets it.
        """
        self.step.forward_backward(**self.arguments(data))

    def finish_train_step(self) -> StepResult | Mapping[str, Any]:
        """Step the optimizer.

        Returns:
            The result of `TrainStep.finish`; a subclass may return a mapping of metrics.
        """
        return self.step.finish(self.increment)

    def abort_train_step(self) -> None:
        """Drop the gradients of the open step, if any."""
        self.step.abort()


class RayTrainer:
    """A trainer with one Ray actor per rank, whose four calls run on all ranks at once.

        trainer = RayTrainer(build, [{"num_gpus": 1}] * 8)
        pump = TrainPump(config, trainer, ...)

    The constructor blocks until all ranks are built. If one fails, it ends all actors and raises. The actors also
    end when this object and the handles in `actors` are gone; `megapatch.reach.ray.assert_consistent` takes these
    handles. MASTER_PORT is a port that was free on the node of rank 0; another process may take it before torch
    does.

    Call other methods of the ranks with `on_all_ranks`, and offer them to the pump in a subclass:

        class Policy(RayTrainer):
            async def sync_weights(self):
                await self.on_all_ranks("sync_weights")

    A call ends when it has ended on all ranks. If it raises on a rank, the step is then aborted on all ranks, and
    the first exception in time is raised.

    Limits: if one rank fails before a collective that another rank waits in, the call ends with the timeout of
    torch's process group, or with `kill`. If finish_train_step() fails on some ranks after others have stepped,
    parameters differ. After an actor has died, make a new trainer from a checkpoint.

    Args:
        build: ``build(rank, world_size)`` runs in each actor. It sets up torch.distributed (RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT are in the environment; set LOCAL_RANK yourself, as it depends on the GPUs
            that Ray makes visible) and the layout: data, tensor, pipeline parallel. It returns the rank's trainer,
            whose methods are plain, for example a `megapatch.streaming.StepTrainer`.
        actor_options: Ray's options of each rank's actor, by rank: num_gpus, a placement group's
            scheduling_strategy, runtime_env. Their number is the number of ranks.

    Attributes:
        actors: the actors' handles, by rank.

    Raises:
        MisuseError: actor_options is empty.
        Exception: any that `build` raises.
    """

    def __init__(self, build: Callable[[int, int], Trainer], actor_options: Sequence[Mapping[str, Any]]) -> None:
        import ray

        if not actor_options:
            raise MisuseError("RayTrainer() starts one actor per entry of actor_options; expected at least one")
        kind: Any = ray.remote(_Rank)
        self.actors: list[Any] = [kind.options(**options).remote() for options in actor_options]
        size = len(self.actors)
        try:
            master = ray.get(self.actors[0].address.remote())
            ray.get([actor.build.remote(build, rank, size, master) for rank, actor in enumerate(self.actors)])
        except BaseException:
            self.kill()
            raise

    async def begin_train_step(self) -> None:
        """Begin an optimizer step on all ranks."""
        await self._in_step("begin_train_step")

    async def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one prompt group on all ranks.

        Args:
            data: the whole group, which every rank gets: an ObjectRef, or data that is put into Ray's object store
                once.
        """
        import ray

        if not isinstance(data, ray.ObjectRef):
            data = await asyncio.to_thread(ray.put, data)
        await self._in_step("train_microbatch", data)

    async def finish_train_step(self) -> Any:
        """Step the optimizer on all ranks.

        Returns:
            The result of rank 0.
        """
        return (await self._in_step("finish_train_step"))[0]

    async def abort_train_step(self) -> None:
        """Drop the gradients of the open step on all ranks."""
        await self.on_all_ranks("abort_train_step")

    async def on_all_ranks(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the ranks' trainers, which `build` returned, and wait for all ranks.

        Args:
            method: the method's name.
            *args: its arguments; Ray replaces an ObjectRef by the object.
            **kwargs: its keyword arguments, likewise.

        Returns:
            The results, by rank.

        Raises:
            Exception: the first one in time that a rank raised; a note (from Python 3.11 on) names the ranks.
        """
        failures: list[tuple[int, Exception]] = []

        async def on(rank: int, actor: Any) -> Any:
            try:
                return await actor.call.remote(method, *args, **kwargs)
            except Exception as error:
                failures.append((rank, error))

        results = await asyncio.gather(*(on(rank, actor) for rank, actor in enumerate(self.actors)))
        if failures:
            (rank, error), *others = failures
            if add_note := getattr(error, "add_note", None):  # from Python 3.11 on
                also = "".join(f"; then on rank {rank}: {type(other).__name__}" for rank, other in others)
                add_note(f"{method}() failed on rank {rank} of {len(self.actors)}{also}")
            raise error
        return list(results)

    def kill(self) -> None:
        """End the actors at once, even those that wait in a collective."""
        import ray

        for actor in self.actors:
            ray.kill(actor)

    async def _in_step(self, method: str, *args: Any) -> list[Any]:
        try:
            found: list[Any] = await finished(await self.on_all_ranks(method, *args), f"{method}()")
            return found
        except Exception as error:
            try:
                await self.abort_train_step()
            except Exception as failure:
                tell_besides(
                    f"after {method}() failed, abort_train_step() failed, too", failure, error, "worker-abort"
                )
            raise


class _Rank:
    """The actor of one rank."""

    def address(self) -> tuple[str, int]:
        import ray

        util: Any = ray.util
        with socket.socket() as free:
            free.bind(("", 0))
            return util.get_node_ip_address(), free.getsockname()[1]

    def build(
        self, build: Callable[[int, int], Trainer], rank: int, world_size: int, master: tuple[str, int]
    ) -> None:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=master[0], MASTER_PORT=str(master[1])
        )
        self.trainer = build(rank, world_size)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.trainer, method)(*args, **kwargs)
