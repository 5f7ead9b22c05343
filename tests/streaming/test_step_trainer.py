"""A rank's trainer around a TrainStep, and how the ranks of a RayTrainer are called as one; without either."""

from __future__ import annotations

import asyncio
import sys
from unittest import mock

from rigs.streaming.world import raised

from megapatch.streaming import RayTrainer, StepTrainer


def test_the_four_calls_are_those_of_its_step():
    step = mock.Mock()
    trainer = StepTrainer(step, lambda data: {"num_microbatches": len(data)}, increment=8)
    trainer.begin_train_step()
    assert trainer.train_microbatch("abc") is None  # what it returned need not travel
    assert trainer.finish_train_step() is step.finish.return_value
    trainer.abort_train_step()
    assert step.mock_calls == [
        mock.call.begin(),
        mock.call.forward_backward(num_microbatches=3),
        mock.call.finish(8),
        mock.call.abort(),
    ]


class Actor:
    """A Ray actor's handle, as far as it is used."""

    def __init__(self, outcome):
        self.call, self.outcome, self.calls = self, outcome, []

    async def remote(self, method, *args):
        self.calls.append(method)
        if method != "abort_train_step":
            await self.outcome()


def ranks(*outcomes):
    trainer = RayTrainer.__new__(RayTrainer)
    trainer.actors = [Actor(outcome) for outcome in outcomes]
    return trainer


def test_the_first_failure_by_time_is_raised_when_all_ranks_are_done():
    async def main():
        first_failed, may_end, ended = asyncio.Event(), asyncio.Event(), []

        async def fails_late():
            await first_failed.wait()
            raise KeyError("late")

        async def fails():
            first_failed.set()
            raise ValueError("first")

        async def works_long():
            await may_end.wait()
            ended.append(True)

        trainer = ranks(fails_late, fails, works_long)
        call = asyncio.ensure_future(raised(trainer.begin_train_step()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done()
        assert trainer.actors[0].calls == ["begin_train_step"]  # no abort before all are done
        may_end.set()
        error = await call
        assert isinstance(error, ValueError) and ended
        if sys.version_info >= (3, 11):
            assert error.__notes__ == ["begin_train_step() failed on rank 1 of 3; then on rank 0: KeyError"]
        assert [actor.calls for actor in trainer.actors] == [["begin_train_step", "abort_train_step"]] * 3

    asyncio.run(main())
