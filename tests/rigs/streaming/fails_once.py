"""A trainer of a TrainPump that fails in the middle of a step."""

from __future__ import annotations


class FailsOnce:
    """Mixed into an adapter: fails once, after two calls have added gradients, and keeps the last metrics."""

    calls, failing = 0, 2

    def train_microbatch(self, data):
        super().train_microbatch(data)
        self.calls += 1
        if self.calls == self.failing:
            raise ValueError("the second group")

    def finish_train_step(self):
        self.found = super().finish_train_step()
        return self.found
