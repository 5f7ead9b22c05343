"""Stands for SGLang's kernels, which PyPI has for GPUs only: on a CPU SGLang imports them, and calls none."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"there is no kernel {name} here")

    return kernel
