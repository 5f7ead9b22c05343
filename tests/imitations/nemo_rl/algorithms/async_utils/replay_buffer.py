"""An imitation of NeMo-RL main's module of this name: the buffer of an asynchronous controller."""

import itertools
from types import SimpleNamespace


class TQReplayBuffer:
    """Slots in parallel lists: reserved before a rollout, and ready after it."""

    def __init__(self, dp_client, partition_id, *, pad_value_dict):
        self._dp_client, self._partition_id = dp_client, partition_id
        self.meta_list, self.start_weight_list, self.ready_list, self._group_ids = [], [], [], []
        self._names = itertools.count()

    def reserve(self, *, weight_version, target_step=None, group_id=None):
        name = group_id or f"group {next(self._names)}"
        of_slot = (None, weight_version, False, name)
        for slots, value in zip(self._lists(), of_slot, strict=True):
            slots.append(value)
        return name

    async def commit(self, group_id, record, start_weight_version, end_weight_version):
        names = [f"{group_id}_g{number}" for number in range(record.size)]
        self._dp_client.put_samples(sample_ids=names, partition_id=self._partition_id, fields=record, tags=[])
        place = self._group_ids.index(group_id)
        self.meta_list[place], self.ready_list[place] = SimpleNamespace(sample_ids=names), True
        return self.meta_list[place]

    async def remove_group(self, group_id, *, remove_in_dp=False):
        return await self.remove([self._group_ids.index(group_id)], remove_in_dp)

    async def remove(self, idxs, remove_in_dp):
        names = [name for place in idxs for name in getattr(self.meta_list[place], "sample_ids", ())]
        for place in sorted(idxs, reverse=True):
            for slots in self._lists():
                del slots[place]
        if remove_in_dp:
            self._dp_client.clear_samples(sample_ids=names, partition_id=self._partition_id)
        return len(idxs)

    def _lists(self):
        return self.meta_list, self.start_weight_list, self.ready_list, self._group_ids
