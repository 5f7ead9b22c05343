"""Helpers by which diagnoses read upstream's code, and stand-ins with which they run it."""

import re
import subprocess
import sys

import pytest

from megapatch._python.dotted import find
from megapatch.patch import ABSENT, FIXED, NEEDED, UNKNOWN, NotAsExpected, Verdict
from megapatch.patches import _diagnosis
from megapatch.patches._diagnosis import (
    StandIn,
    expect_none,
    in_finally,
    most_urgent,
    real_imports_but,
    resolve,
    unmet,
)
from megapatch.patches.nemo_rl._workers import takes


def gathers(model):
    """Calls model.start_param_sync(), and model.gather() if there is a gather()."""
    model.start_param_sync()


def asserts(model):
    assert model, "gather() has to run before"


def test_a_name_in_a_docstring_is_not_in_the_code():
    path = f"{__name__}:gathers"
    assert unmet.names(path, "start_param_sync", "gather") == [f"gather in {path}"]
    assert unmet.names(f"{__name__}:asserts", "gather") == []  # in a text of the code


def refuses(model):
    raise ValueError("call gather() before")


HERE = f"{__name__}:"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (unmet.names(f"{HERE}gone", "model"), [f"{HERE}gone"]),
        (unmet.names(f"{HERE}refuses", "before", "two words"), [f'the text "two words" in {HERE}refuses']),
        (unmet.parameters(f"{HERE}gathers", "model", "gone"), [f"parameter gone of {HERE}gathers"]),
        (unmet.parameters(f"{HERE}HERE", "model"), [f"{HERE}HERE"]),
        (unmet.attributes(HERE, "gathers", "gone"), [f"{__name__}.gone"]),
        (unmet.attributes(f"{HERE}gathers", "__name__", "gone"), [f"{HERE}gathers.gone"]),
        (unmet.reads(f"{HERE}gathers", "start_param_sync", "model"), [f"model in {HERE}gathers"]),
        (unmet.reads(f"{HERE}asserts", "gather() has to run before"), []),  # as getattr() would read it
        (unmet.reads(f"{HERE}gone", "model"), [f"model in {HERE}gone"]),
    ],
)
def test_what_is_missing_is_listed_and_refused(found, expected):
    assert found == expected
    if expected:
        with pytest.raises(NotAsExpected, match=f"^expected but not found: {re.escape(', '.join(expected))}$"):
            expect_none(*found)
    else:
        expect_none(*found)


def test_a_name_that_is_gone_is_absent_only_where_the_release_is_known_to_lack_it():
    here = sys.modules[__name__]
    assert _diagnosis.gone("f", here, lambda module: "it came later") == Verdict(
        ABSENT, "this version has no f: it came later"
    )
    for lacking in (None, lambda module: ""):
        with pytest.raises(NotAsExpected, match=f"{HERE}f$"):
            _diagnosis.gone("f", here, lacking)


def test_of_several_verdicts_the_most_urgent_counts():
    unknown, needed, fixed = (Verdict(kind, "reason") for kind in (UNKNOWN, NEEDED, FIXED))
    assert most_urgent(fixed, unknown, needed) is unknown
    assert most_urgent(fixed, needed, fixed) is needed
    assert most_urgent(fixed) is fixed


def test_upstreams_own_package_is_not_imported_while_a_diagnosis_runs_its_code():
    """A diagnosis runs while Megatron is imported: its modules may not be there yet."""
    imported = real_imports_but("megatron_of_a_test", StandIn)
    assert isinstance(imported("megatron_of_a_test.core", names=("a",)), StandIn)
    assert isinstance(imported("core", names=("a",), level=1), StandIn)
    assert imported("json").loads("1") == 1


def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorated
def prepare(self, keep=True, *buffers, keep_train_buffers=False, **others):
    local = buffers
    return local


def test_parameters_are_seen_through_a_decorator_and_locals_are_none():
    found = {name for name in ("keep", "keep_train_buffers", "others", "local") if takes(prepare, name)}
    assert found == {"keep", "keep_train_buffers"}


def syncs(client):
    client.pause()
    client.resume()


def syncs_and_always_resumes(client):
    client.pause()
    try:
        client.sync()
    finally:
        client.resume()


def syncs_in_branches(client, colocated):
    if colocated:
        client.pause()
        client.resume()
    else:
        client.pause()
        client.resume()


def test_a_finally_is_told_from_calls_in_branches():
    assert in_finally(syncs_and_always_resumes, "resume")
    assert not in_finally(syncs_and_always_resumes, "pause")
    assert not in_finally(syncs, "resume")
    assert not in_finally(syncs_in_branches, "resume", branches=2)


def test_a_dotted_path_that_ends_early_is_none():
    here = sys.modules[__name__]
    assert find(here, "syncs.__name__") == "syncs"
    assert find(here, "") is here
    assert find(here, "syncs.code.co_names") is find(here, "gone.__name__") is find(None, "syncs") is None
    assert resolve(f"{__name__}:syncs") is syncs
    assert resolve("a_module.that_is_gone:syncs") is None


REFUSAL = """
from megapatch.patches._diagnosis import NotAsExpected, running

try:
    with running("code"):
        raise ValueError("no")
except NotAsExpected as refusal:
    print(refusal)
"""


def test_without_assertions_the_reason_blames_no_release():
    plain, optimized = (
        subprocess.run([sys.executable, *flags, "-c", REFUSAL], capture_output=True, text=True, check=True).stdout
        for flags in ((), ("-O",))
    )
    assert "ValueError: no" in plain and "assertions" not in plain
    assert "python -O" in optimized and "ValueError" not in optimized
