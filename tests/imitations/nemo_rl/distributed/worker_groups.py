"""An imitation of NeMo-RL's module of this name."""

from __future__ import annotations

from dataclasses import dataclass


def wait(futures):
    import ray  # here: where it is not installed the module can be imported still

    return ray.get(futures)


@dataclass
class MultiWorkerFuture:
    futures: list
    return_from_workers: list


class RayWorkerGroup:
    """Made by the rig. Data is sharded along an axis, or replicated."""

    def run_all_workers_single_data(self, method_name, *args, **kwargs):
        return [getattr(worker, method_name).remote(*args, **kwargs) for worker in self._workers]

    def run_all_workers_sharded_data(
        self,
        method_name,
        in_sharded_axes=(),
        replicate_on_axes=(),
        output_is_replicated=(),
        common_kwargs=None,
        **kwargs,
    ):
        futures, told_by = [], []
        for index, worker in enumerate(self._workers):
            coordinates = self.sharding_annotations.get_worker_coords(index)
            assert coordinates.keys() == {*in_sharded_axes, *replicate_on_axes}
            own = kwargs
            for axis in in_sharded_axes:
                own = {name: shards[coordinates[axis]] for name, shards in own.items()}
            if not any(coordinates[axis] for axis in output_is_replicated):
                told_by.append(index)
            futures.append(getattr(worker, method_name).remote(**own, **(common_kwargs or {})))
        return MultiWorkerFuture(futures, told_by)

    def get_all_worker_results(self, future_bundle):
        found = wait(future_bundle.futures)
        return [found[index] for index in future_bundle.return_from_workers]
