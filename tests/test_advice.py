"""The advice on a patch that is not in place."""

from __future__ import annotations

import pytest

from megapatch._engine.advice import acceptance, advice, at_risk
from megapatch.patch import NEEDED, Patch, Site, Verdict
from megapatch.patches import PATCHES

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
