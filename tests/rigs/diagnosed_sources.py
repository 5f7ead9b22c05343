"""Tables of what diagnoses say of sources that are like the real code. They need neither torch nor Megatron."""

import importlib

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


def each_source(table):
    """Return a test of the rows of {diagnosis: {case: (source, verdict, words of the reason)}}."""
    names = [case for rows in table.values() for case in rows]
    assert len(names) == len(set(names))
    cases = [(diagnose, *row) for diagnose, rows in table.items() for row in rows.values()]

    @pytest.mark.parametrize("source_case", cases, ids=names)
    def test_the_verdict(source_case, modules):
        assert_verdict_of_source(source_case, modules)

    return test_the_verdict


def assert_verdict_of_source(source_case, modules):
    """Write the source, import it, and compare what the diagnosis says of it with what the row expects."""
    diagnose, source, kind, text = source_case
    verdict = verdict_of(diagnose, importlib.import_module(modules.write(source)))
    assert_verdicts({"source": words(verdict)}, {"source": (kind, text)})
