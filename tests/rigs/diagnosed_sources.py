"""Tables of what diagnoses say of sources that are like the real code. They need neither torch nor Megatron."""

import builtins
import importlib
import keyword
import re

import pytest

from megapatch import Site

NOTHING = "there = 'nothing'"
"""The source of a module without any of the names that a diagnosis looks for."""


def verdict_of(diagnose, module):
    """Return the verdict of a site with this diagnosis: one that refuses may raise."""
    return Site(module.__name__, diagnose).diagnose(module)


def words(verdict):
    """Return the verdict and its reason, which can be sent between processes."""
    return verdict.kind.value, verdict.reason


def assert_verdicts(found, expected):
    """Compare {case: (verdict, reason)} with {case: (verdict, words of the reason)}."""
    assert found.keys() == expected.keys()
    for case, (kind, text) in expected.items():
        assert found[case][0] == kind, (case, found[case])
        assert text in found[case][1], (case, found[case])


def each_source(table, names=()):
    """Return a test of the rows of {diagnosis: {case: (source, verdict, words of the reason)}}.

    Args:
        names: by case, all names of its source without which there is another verdict; after "but" all others.
    """
    ids = [case for rows in table.values() for case in rows]
    assert len(ids) == len(set(ids))
    names = dict(names)
    assert names.keys() <= set(ids)
    cases = [(diagnose, *row, names.get(case)) for diagnose, rows in table.items() for case, row in rows.items()]

    @pytest.mark.parametrize("source_case", cases, ids=ids)
    def test_the_verdict(source_case, modules):
        assert_verdict_of_source(source_case, modules)

    return test_the_verdict


def assert_verdict_of_source(source_case, modules):
    """Write the source, import it, and compare what the diagnosis says of it with what the row expects."""
    diagnose, source, kind, text, *names = source_case
    verdict = verdict_of(diagnose, importlib.import_module(modules.write(source)))
    assert_verdicts({"source": words(verdict)}, {"source": (kind, text)})
    for expected in filter(None, names):
        others = {*re.findall(r"[A-Za-z_]\w+", source)} - {*keyword.kwlist, *dir(builtins), "self"}
        needed = {name for name in others if _kind_without(name, source_case, modules) != kind}
        but, named = expected.startswith("but "), {*expected.removeprefix("but ").split()}
        found = others - needed if but else needed
        assert found == named, found ^ named


def _kind_without(name, source_case, modules):
    """Return the verdict on the source with another name in the place of this one."""
    diagnose, source, *_ = source_case
    try:
        module = importlib.import_module(modules.write(re.sub(rf"\b{name}\b", f"{name}_renamed", source)))
        return verdict_of(diagnose, module).kind.value
    except Exception:  # an import of it, or a failed site
        return None
