"""NeMo-RL's policies and its replay buffer as the parts of a `TrainPump`.

    trainer, buffer = PolicyTrainer(policy, loss_fn), TQBuffer(tq_replay_buffer)
    pump = TrainPump(config, trainer, buffer, weight_synchronizer, InFlightUpdates(rollout_manager))

NeMo-RL's own weight synchronizers are synchronizers of a pump as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import MisuseError
from ._groups import Group

__all__ = ["InFlightUpdates", "PolicyTrainer", "TQBuffer"]


class PolicyTrainer:
    """A `Trainer` of NeMo-RL's Policy, or of its TQPolicy, whose data is in the data plane.

    `nemo_rl.split-train-step-policy` gives them the calls that it makes, where NeMo-RL has none.

    Args:
        policy: a Policy, which trains on a BatchedDataDict; or a TQPolicy, which trains on a KVBatchMeta.
        loss_fn: as for the policy's ``train()``.
        gbs: samples of an optimizer step, over all ranks; by default the policy's setting.
        mbs: samples of a microbatch; by default the policy's setting.

    Raises:
        MisuseError: the policy has no split step.
    """

    def __init__(self, policy: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        self._in_data_plane = hasattr(policy, "dp_client")
        train = "train_microbatches_from_meta" if self._in_data_plane else "train_microbatches"
        if missing := [name for name in ("begin_train_step", train) if not hasattr(policy, name)]:
            raise MisuseError(
                f"the policy, a {type(policy).__name__}, has no {' and no '.join(missing)}: import megapatch "
                "before NeMo-RL, and see what `megapatch doctor` says of nemo_rl.split-train-step-policy"
            )
        self.policy, self.loss_fn, self.gbs, self.mbs = policy, loss_fn, gbs, mbs
        self._train = getattr(policy, train)
        self._is_open = False

    def begin_train_step(self) -> None:
        """Open a step on all workers."""
        self.policy.prepare_for_training()
        self._is_open = True  # before the call: one that fails may have opened it on some
        self.policy.begin_train_step(self.loss_fn, gbs=self.gbs, mbs=self.mbs)

    def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one prompt group on all workers.

        Args:
            data: for the policy's training. For each data-parallel rank it has the same number of whole
                microbatches, unless sequences are packed or batched dynamically.
        """
        self._train(data)

    def finish_train_step(self) -> dict[str, float]:
        """Step the optimizer.

        Returns:
            The loss, the norm of the gradient, and the metrics of all microbatches, reduced as NeMo-RL does it.
        """
        result = self.policy.finish_train_step()
        self._is_open = False
        return _reduced(result)

    def abort_train_step(self) -> None:
        """Drop the gradients of the open step, if any, on all workers."""
        self.policy.abort_train_step()
        self._is_open = False

    def prepare_logprobs(
        self, data: Any, *, refresh_policy_logprobs: bool, refresh_reference_logprobs: bool
    ) -> Any:
        """Compute log-probabilities with the weights of now, also while a step is open.

        Args:
            data: as for `train_microbatch`. A BatchedDataDict gets the columns prev_logprobs and
                reference_policy_logprobs; those of a KVBatchMeta are written into the data plane.
            refresh_policy_logprobs: compute the policy's.
            refresh_reference_logprobs: compute those of the reference model.

        Returns:
            The same data.
        """
        self.policy.prepare_for_lp_inference(keep_train_buffers=self._is_open)
        if refresh_policy_logprobs:
            self._add(data, "get_logprobs", "logprobs", "prev_logprobs")
        if refresh_reference_logprobs:
            columns = ("reference_logprobs", "reference_policy_logprobs")
            self._add(data, "get_reference_policy_logprobs", *columns)
        if self._is_open:  # else begin_train_step() does it
            self.policy.prepare_for_training()
        return data

    def _add(self, data: Any, method: str, computed: str, column: str) -> None:
        if self._in_data_plane:
            getattr(self.policy, f"{method}_from_meta")(data)
        else:
            data[column] = getattr(self.policy, method)(data)[computed]


class TQBuffer:
    """A `Buffer` around NeMo-RL main's TQReplayBuffer, in whose event loop it has to be used.

    Give it to the rollout manager in place of that: it passes `reserve`, `commit`, `remove_group` and `remove` on,
    and notes changes for the pump. Roll a prompt out in `rolling_out`, which names its prompt group; the manager
    makes up a name for each attempt.

        async with pump.rollout(number):
            with buffer.rolling_out(number):
                await rollout_manager.generate_and_push(prompt)

    Args:
        buffer: a TQReplayBuffer. A claim returns the group's KVBatchMeta.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self._prompt: contextvars.ContextVar[Any] = contextvars.ContextVar("prompt", default=None)
        self._prompts: dict[str, Any] = {}  # by the name of the attempt, which is NeMo-RL's group_id
        self._claimed: set[Any] = set()
        self._changes = 0
        self._closed = False
        self._news = asyncio.Event()

    @contextlib.contextmanager
    def rolling_out(self, group_id: Any) -> Iterator[None]:
        """Name the prompt group that rollouts in this context belong to.

        Args:
            group_id: as for ``TrainPump.rollout``; not None.
        """
        token = self._prompt.set(group_id)
        try:
            yield
        finally:
            self._prompt.reset(token)

    def close(self) -> None:
        """Say that nothing more will come."""
        self._closed = True
        self._news.set()

    # ------------------------------------------------------------------------ for the rollout manager
    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.buffer, name)

    def reserve(self, **arguments: Any) -> str:
        """Reserve a slot for a rollout, as TQReplayBuffer does; return the name of the attempt."""
        attempt: str = self.buffer.reserve(**arguments)
        prompt = self._prompt.get()
        self._prompts[attempt] = attempt if prompt is None else prompt
        self._tell()
        return attempt

    async def commit(self, group_id: str, *arguments: Any, **keywords: Any) -> Any:
        """Fill a slot, as TQReplayBuffer does; return the group's KVBatchMeta."""
        meta = await self.buffer.commit(group_id, *arguments, **keywords)
        self._tell()
        return meta

    async def remove_group(self, group_id: str, **arguments: Any) -> int:
        """Drop the slot of an attempt, as TQReplayBuffer does."""
        self._prompts.pop(group_id, None)
        removed: int = await self.buffer.remove_group(group_id, **arguments)
        self._tell()
        return removed

    # ------------------------------------------------------------------------ for the pump
    def samples(self) -> dict[Any, Mapping[str, Any]]:
        """Return the tags of all samples that are not claimed, in order of arrival."""
        found: dict[Any, Mapping[str, Any]] = {}
        for attempt, meta, version, ready in self._slots():
            prompt = self._prompts.get(attempt, attempt)
            if prompt in self._claimed:
                continue
            keys = meta.sample_ids if ready else [attempt]
            tag = {"group_id": prompt, "weight_version": version, "committed": ready}
            found.update((key, {**tag, "expected_num_samples": len(keys)}) for key in keys)
        return found

    def claim(self, group: Group) -> Any:
        """Claim a group, and return its KVBatchMeta.

        Raises:
            MisuseError: it is claimed already, or gone.
        """
        metas = [meta for attempt, meta, _, ready in self._slots() if ready and self._is_of(attempt, group)]
        if group.group_id in self._claimed or not metas:
            raise MisuseError(f"claim(): prompt group {group.group_id!r} is claimed already, or gone")
        self._claimed.add(group.group_id)
        return metas[0]

    def give_back(self, groups: Sequence[Group]) -> None:
        """Undo the claims of these groups. Others among them are left as they are."""
        self._claimed.difference_update(group.group_id for group in groups)
        self._tell()

    async def clear(self, groups: Sequence[Group]) -> None:
        """Drop these groups, and their samples in the data plane. It is not an error if they are gone."""
        for group in groups:
            places = [place for place, slot in enumerate(self._slots()) if self._is_of(slot[0], group)]
            for place in places:
                self._prompts.pop(self.buffer._group_ids[place], None)
            self._claimed.discard(group.group_id)
            await self.buffer.remove(places, remove_in_dp=True)

    def changes(self) -> int:
        """Return a number that grows whenever a sample is added to `samples` or a tag changes."""
        return self._changes

    async def wait_for_change(self, seen: int) -> bool:
        """Wait until `changes` has passed `seen`; return False if the buffer was closed first."""
        while self._changes <= seen and not self._closed:
            await self._news.wait()
        return self._changes > seen

    def _slots(self) -> list[tuple[str, Any, int, bool]]:
        """Return TQReplayBuffer's parallel lists as one.

        Their names are those of nemo_rl/algorithms/async_utils/replay_buffer.py at 7ea279abf.
        """
        own = self.buffer
        return list(zip(own._group_ids, own.meta_list, own.start_weight_list, own.ready_list, strict=True))

    def _is_of(self, attempt: str, group: Group) -> bool:
        return bool(self._prompts.get(attempt, attempt) == group.group_id)

    def _tell(self) -> None:
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()


class InFlightUpdates:
    """Generation of a pump whose engines get new weights while they serve, as NeMo-RL's controller has it.

    A rollout may then end with newer weights than it began with; it counts as one of the weights that it began
    with.

    Args:
        rollout_manager: a RolloutManager, or anything else with ``set_weight_version(version)``.
        generation: whose ``invalidate_kv_cache()`` is called after each sync; None: caches are kept.
    """

    def __init__(self, rollout_manager: Any, generation: Any = None) -> None:
        self.rollout_manager, self.generation = rollout_manager, generation

    def set_weight_version(self, version: int) -> None:
        """Have rollouts from now on bear this version."""
        self.rollout_manager.set_weight_version(version)

    async def pause_generation(self) -> None:
        """Do nothing: requests in flight continue."""

    async def resume_generation(self) -> Any:
        """Drop the engines' caches, if that is asked for; return what is left to wait for."""
        if self.generation is not None:
            return await asyncio.to_thread(self.generation.invalidate_kv_cache)
        return None


# ---------------------------------------------------------------------------- metrics
_MEANS = ("lr", "wd", "reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length")
_LEAST, _MOST = ("probs_ratio_min", "probs_ratio_clamped_min"), ("probs_ratio_max", "probs_ratio_clamped_max")


def _reduced(result: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's result as numbers: NeMo-RL's rules for the metrics of its microbatches."""
    found = {name: float(result[name]) for name in ("loss", "grad_norm") if result.get(name) is not None}
    for name, values in result.get("all_mb_metrics", {}).items():
        numbers = [float(value) for value in values]
        if name in _LEAST + _MOST:
            finite = [number for number in numbers if not math.isinf(number)]
            found[name] = (min if name in _LEAST else max)(finite, default=-1.0)
        else:
            found[name] = sum(numbers) / (len(numbers) if name in _MEANS else 1)
    return found
