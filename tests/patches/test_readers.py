"""A Reader's verdicts on functions that read a model, and its replacements of them."""

import pickle
import sys
from types import ModuleType

import pytest
from rigs.diagnosed_sources import verdict_of

from megapatch.patches._diagnosis import before_release
from megapatch.patches._readers import Reader, ReadingSite
from megapatch.patches.verl.gathered_when_read import PATCH as OF_VERL


@pytest.fixture
def made(monkeypatch):
    """Returns a function that makes an importable module of names."""

    def make(name="made_up", **names):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def export(models):
    for model in models:
        yield from model.parameters()


def gathered_export(models):
    for model in models:
        model.start_param_sync(force_sync=True)
    yield from export(models)


def export_that_says_so(models):
    print("start_param_sync", "call start_param_sync() before")
    yield from export(models)


def imported_gather(models):
    from megapatch.weight_sync import gathered_parameters

    gathered_parameters(models)
    return export(models)


def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorated
def hidden_export(models):
    return [model.disable_forward_pre_hook() for model in models]


def export_of(chunks):
    yield from chunks


EXPORT = Reader("export", "models", stream=True)


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (export, "needed", "with overlap_param_gather export() reads parameters that are not gathered"),
        (export_that_says_so, "needed", "are not gathered"),
        (gathered_export, "fixed", "export() gathers"),
        (imported_gather, "fixed", "export() gathers"),
        (export_of, "unknown", "parameter models of made_up:export"),
        (None, "unknown", "made_up:export"),
    ],
)
def test_exporters(made, found, kind, words):
    verdict = verdict_of(EXPORT.diagnose, made(export=found))
    assert verdict.kind.value == kind
    assert words in verdict.reason


def save(wrapper):
    return wrapper.chunks.state_dict()


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("wrapper.chunks", "needed", "save() reads"),
        ("wrapper.module", "unknown", "module in made_up:save"),
        ("model.chunks", "unknown", "parameter model of made_up:save"),
    ],
)
def test_a_model_that_is_an_attribute_of_a_parameter(made, model, kind, words):
    verdict = verdict_of(Reader("save", model).diagnose, made(save=save))
    assert (verdict.kind.value, words in verdict.reason) == (kind, True), verdict


def test_a_gather_behind_a_decorator_that_says_nothing_of_itself(made):
    verdict = verdict_of(Reader("export", "args").diagnose, made(export=hidden_export))
    assert verdict.kind.value == "fixed"


class Engine:
    def __init__(self, model):
        self.model = model

    def save(self, path):
        return self.sharded(path)


class Inherits(Engine):
    def save(self, path):
        return self.sharded(path), "of mine"


class WithProperty:
    @property
    def model(self): ...

    def save(self, path):
        return self.sharded(path)


class WithoutModel:
    def save(self, path):
        return self.sharded(path)


class SavesAnother(Engine):
    def save(self, path): ...


@pytest.mark.parametrize(
    ("engine", "kind", "words"),
    [
        (Engine, "needed", "save() reads"),
        (Inherits, "needed", "save() reads"),
        (WithProperty, "needed", "save() reads"),
        (WithoutModel, "unknown", "attribute model of made_up:Engine"),
        (SavesAnother, "unknown", "sharded in made_up:Engine.save"),
        (object, "unknown", "made_up:Engine.save"),
    ],
)
def test_methods(made, engine, kind, words):
    verdict = verdict_of(Reader("Engine.save", "self.model", reads=("sharded",)).diagnose, made(Engine=engine))
    assert verdict.kind.value == kind
    assert words in verdict.reason


def test_of_several_readers_the_one_that_needs_most_decides(made):
    module = made(one=gathered_export, two=export, three=export_of)
    kinds = [
        ReadingSite("made_up", *(Reader(name, "models") for name in names)).diagnose(module).kind.value
        for names in (["one"], ["one", "two"], ["two", "three"], ["one", "none"])
    ]
    assert kinds == ["fixed", "needed", "unknown", "unknown"]


def test_a_site_of_readers_can_be_pickled_and_shows_them():
    assert all(isinstance(site, ReadingSite) for site in OF_VERL.sites)
    assert [len(site.readers) for site in OF_VERL.sites] == [1, 1, 1]
    assert len(pickle.loads(pickle.dumps(OF_VERL)).sites) == 3
    copy = pickle.loads(pickle.dumps(ReadingSite("made_up", EXPORT)))
    assert (copy.module, copy.readers, [*copy.replace]) == ("made_up", (EXPORT,), ["export"])


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("0.8.0", "absent"),
        ("0.9.0.dev0", "unknown"),  # of a checkout: it may have it, by another name
        ("0.9.1", "unknown"),
        ("0.10", "unknown"),
        ("main", "unknown"),
        (None, "unknown"),
    ],
)
def test_a_name_that_is_gone_is_absent_only_in_releases_that_never_had_it(tmp_path, monkeypatch, version, kind):
    (tmp_path / "framework").mkdir()
    stated = "" if version is None else f"__version__ = {version!r}"
    (tmp_path / "framework" / "__init__.py").write_text(stated)
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader("export", "models", optional=before_release("framework", "0.9"))
    verdict = verdict_of(reader.diagnose, ModuleType("framework.engine"))
    assert verdict.kind.value == kind
    assert ("it came with framework 0.9" in verdict.reason) is (kind == "absent")


def test_a_stream_in_a_tuple_gathers_at_its_first_next():
    events = []

    class Engine:
        @property
        def module(self):
            events.append("gathered")
            return []

        def shards(self):
            def read():
                yield events.append("read")

            return read(), "metadata"

    stream, metadata = Reader("Engine.shards", "self.module", stream=True).gather_first(Engine.shards)(Engine())
    assert (events, metadata) == ([], "metadata")
    assert [*stream] == [None]
    assert events == ["gathered", "read"]
