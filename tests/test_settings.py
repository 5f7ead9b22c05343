"""Settings as users type them into the environment, and the advice on a patch that is not in place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapatch._engine.advice import acceptance, advice, at_risk
from megapatch._engine.complaints import complaints, unknown_name
from megapatch._engine.engine import this_process
from megapatch._engine.restoring import matching_names
from megapatch._engine.settings import VARIABLES, Settings
from megapatch.errors import MegapatchError
from megapatch.patch import NEEDED, Patch, Site, Verdict
from megapatch.patches import PATCHES
from megapatch.patches._catalogue import RETIRED

NAMES = ["megatron.forward-pre-hook", "megatron.train-reentry", "slime.train-reentry"]


def off(**environment):
    settings = Settings.from_environment({f"MEGAPATCH_{name}": value for name, value in environment.items()})
    said = complaints(settings, NAMES)
    assert settings.may_be_wrong or not said  # otherwise the engine does not look
    return [name for name in NAMES if settings.why_disabled(name)], said


@pytest.mark.parametrize(
    ("environment", "disabled"),
    [
        ({}, []),
        ({"DISABLE": "", "ONLY": ""}, []),
        ({"DISABLE": "megatron.train-reentry"}, NAMES[1:2]),
        ({"DISABLE": " slime.* , *.forward-pre-hook,"}, [NAMES[0], NAMES[2]]),
        ({"DISABLE": "*"}, NAMES),
        ({"ONLY": "megatron.*"}, NAMES[2:]),
        ({"ONLY": "megatron.*", "DISABLE": "*.train-reentry"}, NAMES[1:]),
    ],
)
def test_names_and_globs(environment, disabled):
    assert off(**environment) == (disabled, [])


def test_an_unknown_name_is_said_once_with_near_matches():
    assert off(DISABLE="megatron.forward-prehook,xyz", ONLY="slime.*")[1] == [
        "MEGAPATCH_DISABLE: no patch is called 'megatron.forward-prehook'; "
        "did you mean megatron.forward-pre-hook or megatron.train-reentry?",
        f"MEGAPATCH_DISABLE: no patch is called 'xyz'; known patches: {', '.join(NAMES)}.",
    ]


def test_a_removed_patch_stays_known(monkeypatch):
    monkeypatch.setitem(RETIRED, "megatron.gone", "megatron-core 0.99.0")
    assert off(DISABLE="megatron.gone,megatron.go*", ONLY="megatron.gone") == (NAMES, [])
    this_process().restore("megatron.gone")  # changes nothing
    with pytest.raises(MegapatchError, match=r"was removed from megapatch; megatron-core 0\.99\.0 has the repair"):
        matching_names(this_process().roster, ["megatron.gone"])
    with pytest.raises(MegapatchError, match="no patch is called"):
        this_process().restore("megatron.never")


def test_a_family_needs_an_asterisk():
    for variable in "DISABLE", "ONLY":
        assert off(**{variable: "megatron"})[1] == [
            f"MEGAPATCH_{variable}: no patch is called 'megatron'; did you mean megatron.*?"
        ]


def test_the_reason_names_the_variable_and_what_was_typed():
    assert Settings(disable=("m*",)).why_disabled("me.too") == "switched off by MEGAPATCH_DISABLE=m*"
    assert Settings(only=("a", "b")).why_disabled("me.too") == "not named by MEGAPATCH_ONLY=a,b"
    both = Settings(only=("a",), disable=("me.too",))
    assert both.why_disabled("me.too") == "switched off by MEGAPATCH_DISABLE=me.too"


def test_patches_by_a_property():
    """One that is not loaded may change numbers."""
    for settings, kept, changing in (
        (Settings(only=("@same-numbers",)), None, "not named by MEGAPATCH_ONLY=@same-numbers"),
        (Settings(disable=("@same-numbers",)), "switched off by MEGAPATCH_DISABLE=@same-numbers", None),
        (Settings(only=("@same-numbers", "megatron.*")), None, None),
    ):
        assert complaints(settings, NAMES) == []
        assert settings.why_disabled("megatron.too", changes_numbers=False) == kept
        assert settings.why_disabled("megatron.too") == changing
        assert settings.switched_off("megatron.too") is None


def test_an_unknown_property_is_said_with_the_known_one():
    for pattern in ("@same", "@same-numbers*", "@*"):
        said = f"MEGAPATCH_ONLY: no selection of patches is called '{pattern}'; known: @same-numbers"
        assert complaints(Settings(only=(pattern,)), NAMES, more_to_come=True) == [said]
        assert Settings(only=(pattern,)).why_disabled("me.too", changes_numbers=False)


def test_at_most_three_near_matches():
    names = [f"slime.{letter}-hook" for letter in "abcde"]
    (complaint,) = complaints(Settings(disable=("slime.x-hook",)), names)
    assert complaint.count(" or ") == 2


def test_of_many_names_the_families_are_listed():
    patches, rules = [f"slime.{letter}" for letter in "abcdefghij"], [f"rule-{letter}" for letter in "abcdefghij"]
    assert unknown_name("xyz", patches).endswith("known patches: slime.*.")
    assert unknown_name("xyz", rules, "rule", "rules").endswith(f"known rules: {', '.join(rules)}.")


def test_a_name_that_may_be_of_a_patch_to_come_is_not_judged():
    """It has a family, and not one of a known patch: a typing error there shows at once."""
    for pattern, judged in {"theirs.patch": False, "the*": False, "theirs": True, "slime.patch": True}.items():
        settings = Settings(only=(pattern,))
        assert bool(complaints(settings, NAMES, more_to_come=True)) == judged
        assert complaints(settings, NAMES)


def test_only_the_audit_may_be_told_to_raise():
    raising = {"MEGAPATCH_AUDIT": "raise", "MEGAPATCH_STRICT": "raise"}
    settings = Settings.from_environment(raising)
    assert settings.audit and settings.strict
    assert complaints(settings, NAMES) == ["MEGAPATCH_STRICT=raise is neither 1 nor 0; it is taken for 1"]
    misspelt = off(AUDIT="riase")[1]
    assert misspelt == ["MEGAPATCH_AUDIT=riase is neither 1, 0 nor raise; it is taken for 1"]


def test_the_audits_variables_without_the_audit_are_said():
    for name, value in {"AUDIT_EVERY": "5", "AUDIT_ACCEPT": "stepped-once"}.items():
        said = f"MEGAPATCH_{name} is set, and MEGAPATCH_AUDIT is not; set MEGAPATCH_AUDIT=1 to watch"
        for audit, expected in {"": [said], "0": [], "1": []}.items():
            assert off(**{name: value, "AUDIT": audit})[1] == expected


@pytest.mark.parametrize("variable", ["AUDIT", "STRICT", "NO_ENTRY_POINTS", "QUIET"])
def test_switches(variable):
    for value, on in {
        "": False,
        "0": False,
        " no ": False,
        "false": False,
        "OFF": False,
        "1": True,
        "True": True,
        "yes": True,
        "on": True,
    }.items():
        settings = Settings.from_environment({f"MEGAPATCH_{variable}": value})
        assert (getattr(settings, variable.lower()), complaints(settings, NAMES)) == (on, [])
        assert (settings.is_off(f"MEGAPATCH_{variable}"), settings.is_off("MEGAPATCH_ONLY")) == (not on, False)
    settings = Settings.from_environment({f"MEGAPATCH_{variable}": "perhaps"})
    assert getattr(settings, variable.lower())
    neither = "1, 0 nor raise" if variable == "AUDIT" else "1 nor 0"
    assert complaints(settings, NAMES) == [f"MEGAPATCH_{variable}=perhaps is neither {neither}; it is taken for 1"]


def test_the_page_has_each_variable_with_the_meaning_that_doctor_shows():
    page = (Path(__file__).parents[1] / "docs/settings.md").read_text().replace("`", "")
    rows = dict(re.findall(r"^\| (MEGAPATCH_\w+)=\S+ \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == VARIABLES.keys()
    for name, meaning in VARIABLES.items():
        assert rows[name].startswith(meaning), name


# ------------------------------------------------------------------------ advice
DOC = """Greetings are loud.

Symptom   whispers, e.g. at night. Then
          nobody answers.
Upstream  nowhere.

Some text.
Cost      none.
"""


def make(doc):
    return Patch(
        "test.louder", doc, "https://example.com", (Site("some.module", lambda module: Verdict(NEEDED, "")),)
    )


def test_the_sections_of_a_docstring():
    assert make(DOC).sections == {
        "Symptom": "whispers, e.g. at night. Then nobody answers.",
        "Upstream": "nowhere.",
        "Cost": "none.",
    }
    indented = DOC.replace("\n", "\n    ")
    assert make(indented).sections == make(DOC).sections


def test_one_line_says_what_is_at_risk_how_to_accept_it_and_where_to_report_it():
    assert advice(make(DOC)) == (
        "at risk: whispers, e.g. at night. Then nobody answers; to run without: MEGAPATCH_DISABLE=test.louder; "
        "to report: `megapatch doctor --report` writes a file to attach (https://github.com/megapatch/megapatch/issues)"
    )


def test_without_a_symptom_it_is_the_summary():
    assert at_risk(make("Greetings are loud.")) == "at risk: Greetings are loud."


def test_only_whole_sentences_are_shown_unless_the_first_one_is_too_long():
    short, long = "It fails.", f"It {'really ' * 50}fails."
    assert at_risk(make(f"Loud.\n\nSymptom   {short} {short} {long}")) == "at risk: It fails. It fails"
    cut = at_risk(make(f"Loud.\n\nSymptom   {long} {short}"))
    assert cut.endswith(" really really ...") and len(cut) < 300


def test_what_is_disabled_already_stays_so():
    assert acceptance(["b.b", "a.a"], ["a.*", "b.b"]) == "to run without: MEGAPATCH_DISABLE=a.*,b.b,a.a"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_has_a_risk_of_one_line(patch):
    assert {"Symptom", "Upstream", "Cost"} <= patch.sections.keys()
    assert 30 < len(at_risk(patch)) < 300
