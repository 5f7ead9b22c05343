"""Functions that read a model's parameters, as data: a `Reader` says where one is, and which model it reads.

A `ReadingSite` lets them gather first (see `megapatch.weight_sync.gathered_parameters`): the one
answer to "does this function gather before it reads?" for every framework. The audit watches the same readers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from .._mcore.known import arguments_of
from .._mcore.param_gathers import ddps_in, gather_params
from .._python.dotted import find
from ..patch import FIXED, NEEDED, UNKNOWN, Site, Verdict
from ._diagnosis import Lacking, codes_of, expect_none, gone, reads_in_order, resolve, unmet

GATHERS = ("start_param_sync", "finish_param_sync", "disable_forward_pre_hook", "gathered_parameters")
"""Names of which a reader that gathers uses one."""


class Reader(NamedTuple):
    """A function that all ranks call, and that reads the parameters of a model.

    Attributes:
        path: of the function in its module, such as ``"Class.method"``.
        model: the model, or a list of its chunks, as an expression of the function's parameters: ``"models"``,
            ``"self.model"``. None in its place means that this rank only receives.
        reads: names that the function's code has to use: without them it is another function than the known one.
        stream: whether it returns a generator, or a tuple that begins with one. A generator gathers at its first
            `next`, as it may have been made before the optimizer step.
        optional: says which releases lack the function; where it is None, all known ones have it.
    """

    path: str
    model: str
    reads: tuple[str, ...] = ()
    stream: bool = False
    optional: Lacking | None = None

    def diagnose(self, module: ModuleType) -> Verdict:
        """Read the real function: running it takes a model."""
        function = find(module, self.path)
        if function is None:
            return gone(f"{self.path}()", module, self.optional)
        path, name = f"{module.__name__}:{self.path}", self.path.rpartition(".")[2]
        expect_none(*self._missing_model(path), *unmet.reads(path, *self.reads))
        if reads_in_order(function, *GATHERS):
            return Verdict(FIXED, f"{name}() gathers the parameters that it reads")
        return Verdict(NEEDED, f"with overlap_param_gather {name}() reads parameters that are not gathered")

    def _missing_model(self, path: str) -> list[str]:
        parameter, _, attribute = self.model.partition(".")
        if parameter != "self":
            return unmet.parameters(path, parameter) or (unmet.reads(path, attribute) if attribute else [])
        owner = path.rpartition(".")[0]
        known = not attribute or _owns(resolve(owner), attribute)
        return [] if known else [f"attribute {attribute} of {owner}"]

    def gather_first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which gathers before it reads its first parameter."""
        return self.before_reading(function, lambda model: gather_params(ddps_in(model())))

    def before_reading(
        self, function: Callable[..., Any], act: Callable[[Callable[[], Any]], object]
    ) -> Callable[..., Any]:
        """Return the function, which calls `act` before it reads the first parameter.

        act: called with a function that looks for the model in the arguments; an empty list if it is not there.
        """
        model_of = self.model_in(function)
        wrap = _acts_at_first_next if self.stream else _acts_first
        return wrap(function, lambda *args, **kwargs: act(lambda: model_of(*args, **kwargs)))

    def model_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the same arguments that returns the model: a module, or a list of its chunks."""
        parameter, *attributes = self.model.split(".")
        signature = inspect.signature(function)

        def model_of(*args: Any, **kwargs: Any) -> Any:
            # Decorators of upstream's may hide the signature, and never the object of a method.
            if parameter == "self":
                model = args[0] if args else None
            else:
                model = arguments_of(signature, args, kwargs).get(parameter)
            for name in attributes:
                model = getattr(model, name, None)
            return [] if model is None else model

        return model_of


class ReadingSite(Site):
    """The site of a module's readers, which are installed all or none: an optional one stands alone.

    Attributes:
        readers: those that gather first.
    """

    readers: tuple[Reader, ...]

    def __init__(self, module: str, *readers: Reader) -> None:
        super().__init__(
            module=module,
            diagnose=functools.partial(_diagnose_all, readers),
            replace={reader.path: reader.gather_first for reader in readers},
        )
        self._set(readers=readers)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadingSite, (self.module, *self.readers)


def _diagnose_all(readers: tuple[Reader, ...], module: ModuleType) -> Verdict:
    """Return the verdict that matters most: one gather too many costs nothing."""
    verdicts = {verdict.kind: verdict for verdict in [reader.diagnose(module) for reader in readers][::-1]}
    return next((verdicts[kind] for kind in (UNKNOWN, NEEDED) if kind in verdicts), [*verdicts.values()][-1])


def _owns(cls: type, attribute: str) -> bool:
    """Whether objects of the class have the attribute: a method, its own or inherited, mentions it."""
    return any(
        name == attribute or any(attribute in code.co_names for code in codes_of(member))
        for base in cls.__mro__
        for name, member in vars(base).items()
    )


# ------------------------------------------------------------------------ replacements
def _acts_first(reader: Callable[..., Any], act: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(reader)
    def patched_reader(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return reader(*args, **kwargs)

    return patched_reader


def _acts_at_first_next(stream: Callable[..., Any], act: Callable[..., object]) -> Callable[..., Any]:
    """Wrap a function that returns a generator, or a tuple that begins with one.

    It is called at once: one that is not a generator function may check its arguments, and open files, before it
    returns its generator.
    """

    @functools.wraps(stream)
    def patched_stream(*args: Any, **kwargs: Any) -> Any:
        def acting(tensors: Iterator[Any]) -> Generator[Any, Any, Any]:
            act(*args, **kwargs)
            return (yield from tensors)

        result = stream(*args, **kwargs)
        return (acting(result[0]), *result[1:]) if isinstance(result, tuple) else acting(result)

    return patched_stream
