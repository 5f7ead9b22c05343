"""A loss that raises once in a process."""


class Failing:
    calls = 0

    def __init__(self, loss, at):
        self.loss, self.at = loss, at

    def __getattr__(self, name):
        if name.startswith("__") or name in ("loss", "at"):
            raise AttributeError(name)
        return getattr(self.loss, name)

    def __call__(self, *args, **kwargs):
        Failing.calls += 1
        if Failing.calls == self.at:
            raise ConnectionError("a loss that fails")
        return self.loss(*args, **kwargs)
