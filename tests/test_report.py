"""The report as table, dictionary and digest."""

from __future__ import annotations

import importlib
import json

from rigs.engine import TARGET, activated, make_patch

import megapatch
from megapatch._reporting.report import SiteReport, make_report
from megapatch.patch import FIXED, NEEDED, Patch, Status, Verdict
from megapatch.patches import PATCHES


def test_the_dictionary_has_the_promised_layout(modules):
    name = modules.write(TARGET)
    holder = importlib.import_module(modules.write(f"from {name} import greet\n", stem="holder")).__name__
    engine = activated(make_patch(name, changes_numbers=True))
    report = make_report(engine.records)
    told = json.loads(json.dumps(report.to_dict()))
    assert set(told) == {"schema", "digest", "versions", "patches"}
    assert told["schema"] == 1
    assert told["digest"] == report.digest
    assert told["versions"]["wrapt"]
    assert told["patches"] == [
        {
            "name": "test.louder",
            "family": "test",
            "status": "applied",
            "reason": "it is too quiet",
            "upstream": "https://example.com/issues/1",
            "changes_numbers": True,
            "targets": [f"{name}:greet"],
            "sites": [
                {
                    "module": name,
                    "status": "applied",
                    "reason": "it is too quiet",
                    "verdict": "needed",
                    "targets": [f"{name}:greet"],
                    "rebound": [f"{holder}:greet"],
                    "out_of_reach": [],
                    "foreign": [],
                    "traceback": None,
                }
            ],
        }
    ]


def test_a_patch_shows_the_status_that_most_needs_attention_among_its_installed_sites(modules):
    good, fixed, broken = (modules.write(TARGET) for _ in range(3))
    here = make_patch(good).sites[0]
    there = make_patch(fixed, diagnose=lambda module: Verdict(FIXED, "upstream did it")).sites[0]
    wrong = make_patch(broken, diagnose=lambda module: 1).sites[0]
    nowhere = make_patch("megapatch_no_such_package.module").sites[0]

    def shown(*sites):
        engine = activated(Patch("test.many", "Many.", "https://example.com", sites))
        for site in sites:
            if "no_such" not in site.module:
                importlib.import_module(site.module)
        return make_report(engine.records).patches[0].status.value

    assert shown(nowhere) == "not-installed"
    assert shown(nowhere, there) == "not-needed"
    assert shown(nowhere, there, here) == "applied"
    assert shown(nowhere, there, here, wrong) == "failed"


def test_the_table_tells_all_in_as_many_columns_as_there_are(modules, monkeypatch):
    target = importlib.import_module(modules.write(TARGET))
    long = "it is too quiet, and that has a reason: " + 40 * "very " + "long"
    engine = activated(
        make_patch(
            target.__name__, "greet", "Greeter.greet", "Greeter.__init__", changes_numbers=True, name="a.a"
        ),
        make_patch(modules.write(TARGET), name="b.pending"),
        make_patch(target.__name__, diagnose=lambda module: Verdict(FIXED, long), name="c.long"),
        make_patch(target.__name__, diagnose=lambda module: 1 / 0, name="d.broken"),
        make_patch(target.__name__, name="e.off"),
        *(make_patch("megapatch_no_such_module", name=name) for name in ("f.one", "g.one", "g.two")),
        disable=("e.*",),
    )
    monkeypatch.setattr("megapatch._reporting.report.exact_version", lambda: "0.1.0")  # one line of versions
    report = make_report(engine.records)
    for columns in (80, 60):
        lines = "\n".join(report.table(columns)).split("\n")
        assert not [line for line in lines if len(line) > columns and " " in line.strip()]  # names stay whole
        told = " ".join(" ".join(lines).split())
        assert told.startswith(
            f"applied a.a (changes numbers) {target.__name__} it is too quiet replaced greet "
            "replaced in Greeter: greet, __init__ pending b.pending "
        )
        assert f" not-needed c.long {target.__name__} {long} failed d.broken " in told
        assert "ZeroDivisionError: division by zero Traceback (most recent call last): " in told
        assert told.endswith(
            " disabled, switched off by MEGAPATCH_DISABLE=e.*: e.off not-installed: f.one, g.* (2)"
        )
        assert "e.*" not in told.partition("disabled")[0]
    monkeypatch.setenv("COLUMNS", "70")
    shown = str(report).splitlines()
    assert shown[0].startswith("megapatch ") and shown[-1] == f"digest {report.digest}"
    assert shown[1:-1] == report.table(70) != report.table(100)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    assert str(report).splitlines()[1:-1] == report.table(100)


def test_the_table_shows_all_targets_of_a_site():
    def details(*targets):
        return list(SiteReport("a.b", Status.APPLIED, "why", "needed", targets, (), (), (), None).details())

    assert details() == ["why"]
    assert details("a.b:train", "a.b:save") == ["why", "replaced train, save"]
    assert details("a.b:train", "a.b:C.f", "a.b:save", "a.b:C.g", "a.b:D.h") == [
        "why",
        "replaced train, save",
        "replaced in C: f, g",
        "replaced D.h",
    ]
    assert details("c:train", "c:save", "c:C.f", "d:C.f", "d:C.g") == [
        "why",
        "replaced in c: train, save",
        "replaced c:C.f",
        "replaced in d:C: f, g",
    ]


def test_the_table_tells_of_each_site_that_is_here(modules):
    good, fixed = (importlib.import_module(modules.write(TARGET)).__name__ for _ in range(2))
    sites = (
        make_patch("megapatch_no_such_package.module").sites[0],
        make_patch(good).sites[0],
        make_patch(fixed, diagnose=lambda module: Verdict(FIXED, "upstream did it")).sites[0],
    )
    engine = activated(Patch("test.many", "Many.", "https://example.com", sites))
    assert [line.strip() for line in make_report(engine.records).table(80)] == [
        "applied      test.many",
        good,
        "it is too quiet",
        "replaced greet",
        f"{fixed}: not-needed",
        "upstream did it",
    ]


def test_the_digest_follows_what_is_in_place_and_not_the_words(modules):
    name = modules.write(TARGET)

    def digest(reason, *paths, kind=NEEDED):
        engine = activated(make_patch(name, *paths, diagnose=lambda module: Verdict(kind, reason)))
        importlib.import_module(name)
        found = make_report(engine.records).digest
        engine.restore()
        return found

    assert digest("one reason") == digest("another reason")
    assert digest("") != digest("", "greet", "Greeter.greet")
    assert digest("") != digest("", kind=FIXED)
    assert len(digest("")) == 16


def test_the_public_report_is_of_this_process():
    assert [one.patch for one in megapatch.report().patches[: len(PATCHES)]] == list(PATCHES)
