"""The report as table, dictionary and digest."""

from __future__ import annotations

import importlib
import json

from engine_rig import TARGET, make_engine, make_patch

import megapatch
from megapatch.catalog import PATCHES
from megapatch.patch import FIXED, NEEDED, Patch, Verdict
from megapatch.report import make_report


def test_the_dictionary_has_the_promised_layout(modules):
    name = modules.write(TARGET)
    holder = importlib.import_module(modules.write(f"from {name} import greet\n", stem="holder")).__name__
    engine = make_engine(make_patch(name, changes_numbers=True))
    engine.activate()
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
        engine = make_engine(Patch("test.many", "Many.", "https://example.com", sites))
        engine.activate()
        for site in sites:
            if "no_such" not in site.module:
                importlib.import_module(site.module)
        return make_report(engine.records).patches[0].status.value

    assert shown(nowhere) == "not-installed"
    assert shown(nowhere, there) == "not-needed"
    assert shown(nowhere, there, here) == "applied"
    assert shown(nowhere, there, here, wrong) == "failed"


def test_the_table_tells_status_reason_and_targets(modules):
    target = importlib.import_module(modules.write(TARGET))
    engine = make_engine(make_patch(target.__name__, "greet", "Greeter.greet", changes_numbers=True))
    engine.activate()
    text = str(make_report(engine.records))
    for part in (
        "test.louder",
        "applied",
        "it is too quiet [changes numbers]",
        f"{target.__name__}:Greeter.greet",
    ):
        assert part in text


def test_the_digest_follows_what_is_in_place_and_not_the_words(modules):
    name = modules.write(TARGET)

    def digest(reason, *paths, kind=NEEDED):
        engine = make_engine(make_patch(name, *paths, diagnose=lambda module: Verdict(kind, reason)))
        engine.activate()
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
