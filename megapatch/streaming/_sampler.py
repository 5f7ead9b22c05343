"""Choose the prompt group to train on next, by pure functions of the samples' tags."""

from __future__ import annotations

from dataclasses import dataclass

from ._groups import Groups
from ._tags import Backlog, Group, Samples, TokenStaleness, read_tag


@dataclass(frozen=True)
class StalenessSampler:
    """Picks prompt groups that are ready, not too stale, and not from the future.

    A sample's tag is a mapping with these fields:

    - ``group_id``: identifies its prompt; not None.
    - ``weight_version``: of the weights that it was sampled from; may be missing until the sample is committed.
    - ``weight_versions``, instead, where generation continues across weight syncs: a list of pairs, each of a
      version and the number of tokens that were sampled from it.
    - ``committed``: whether the sample is complete (None: no); True if missing. A group is committed when all of
      its samples are.
    - ``expected_num_samples``: samples of its group; may be missing. If samples disagree, the largest counts.
    - ``reward``: a number, which the pump needs with `StreamingConfig.drop_equal_rewards`; the sampler ignores it.

    A group with samples of several versions is as old as its oldest sample, and from the future if its newest
    sample is. A group is complete when it has exactly as many samples as expected; one with more (a sample that
    came twice) is never picked.

    Args:
        max_staleness: versions that a group may be behind the trainer; 0 is strictly on-policy.
        generations_per_prompt: samples of a group whose tags do not say how many it has.
        token_staleness: the age of a sample with ``weight_versions``: that of its "oldest" token, or of the "mean"
            version of its tokens, rounded down.

    Raises:
        MisuseError: from all methods: a tag has no group_id, or is committed without a weight_version, or has a
            number that is not whole. The message names the sample.
    """

    max_staleness: int
    generations_per_prompt: int
    token_staleness: TokenStaleness = "oldest"

    def select_one_group(self, samples: Samples, trainer_version: int) -> Group | None:
        """Return the eligible group with the least lag, the first to arrive among equals, or None.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return next(iter(self.eligible(samples, trainer_version)), None)

    def eligible(self, samples: Samples, trainer_version: int) -> list[Group]:
        """Return the groups that can be trained on, in the order in which they would be picked.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self.sort_out(samples, trainer_version)[0]

    def evict(self, samples: Samples, trainer_version: int) -> list[Group]:
        """Return the groups that are complete, committed and too old, in order of arrival.

        Groups that are still being written are left out: the rest of such a group would come after its eviction,
        and never be complete.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self.sort_out(samples, trainer_version)[1]

    def sort_out(self, samples: Samples, trainer_version: int) -> tuple[list[Group], list[Group]]:
        """Return the groups of `eligible` and of `evict`, from one pass over the tags.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        groups = self._index(samples, trainer_version)
        too_old = groups.evict(trainer_version)
        return sorted(groups.all_ready(), key=lambda group: trainer_version - (group.weight_version or 0)), too_old

    def backlog(self, samples: Samples, trainer_version: int) -> Backlog:
        """Count the groups, and those that cannot be trained on by reason.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self._index(samples, trainer_version).backlog()

    def _index(self, samples: Samples, trainer_version: int) -> Groups:
        groups = Groups(self.max_staleness, self.generations_per_prompt, trainer_version)
        for number, (key, tag) in enumerate(samples.items()):
            groups.add(key, number, read_tag(key, tag, self.token_staleness))
        return groups
