"""The reports of ranks in one: what several have found is there once, whatever their number and their version."""

from __future__ import annotations

import json
import os
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rigs.command import run

from megapatch._cli.audit import page, read
from megapatch._reporting.files import attempts
from megapatch.audit import RULES, _summary
from megapatch.audit._summary import texts

LINE = "/job/train.py:12 in train"


def found(rule="stepped-once", what="the optimizer steps again", **changes):
    data = {"rule": rule, "what": what, "means": "Damage.", "rank": 0, "step": 3, "last_step": 7, "count": 4}
    causes = [{"cause": "a loop", "check": "it turns"}]
    patches = [{"name": "a.patch", "reason": "switched off"}]
    return {**data, "where": ["/job/main.py:1 in main", LINE], "causes": causes, "patches": patches, **changes}


def summarize(reports):
    return _summary.summarize(attempts(reports))


def report(rank, size=8, findings=(), notes=(), events=None, **changes):
    broken = {each["rule"] for each in findings}
    rules = [{"name": name, "status": "broken", "reason": ""} for name in broken]
    data = {"schema": 1, "version": "0.1.0", "digest": "d", "rank": rank, "size": size, "host": "h", "pid": 1}
    data |= {"settings": {"every": 50, "raises": False, "accepted": []}, "steps": 10, "seconds": 1.0}
    data |= {"began": 0.0, "ended": True, "events": events or {}, "findings": list(findings), "notes": list(notes)}
    return {**data, "rules": [*rules, {"name": "resumed", "status": "kept", "reason": ""}], **changes}


def saves(*steps, count=None):
    first = [{"step": step, "seconds": 0.5, "what": "", "where": LINE} for step in steps]
    return {"save": {"count": count or len(steps), "first": first, "last": []}}


def write(folder, *reports):
    for each in reports:
        (folder / f"audit-{each['rank']:05}.json").write_text(json.dumps(each))


def text(summary):
    return "\n\n".join(texts(summary, 100))


# ------------------------------------------------------------------------ merging
def test_the_same_finding_on_all_ranks_is_there_once():
    summary = summarize([report(rank, findings=[found()]) for rank in range(8)])
    (once,) = summary.found
    assert once.ranks == list(range(8))
    assert once.sentences == [{"what": "the optimizer steps again", "ranks": list(range(8))}]
    assert text(summary).count("stepped-once") == 1
    assert "stepped-once: ranks 0-7, after 3 optimizer steps, 4 times until step 7\n" in text(summary)
    assert f"  at {LINE}\n  at /job/main.py:1 in main\n" in text(summary)


def test_ranks_that_name_other_parameters_share_a_finding():
    many = summarize([report(rank, 99, [found(what=f"rank {rank // 2}")]) for rank in range(99)])
    assert [each["ranks"] for each in many.found[0].sentences] == [[2 * n, 2 * n + 1] for n in range(8)]
    assert "\n  ranks 0-1: rank 0\n" in text(many) and "\n  and 42 more\n" in text(many)
    (twice,) = summarize([report(0, 1, [found(), found(what="it steps")])]).found
    assert twice.ranks == twice.first_on == [0] and len(twice.sentences) == 2


def test_another_line_kind_or_rule_is_another_finding():
    several = [found(), found(where=[]), found("resumed", "generation is paused"), found(kind="late")]
    several += [found(where=["/job/main.py:1 in main", "/job/train.py:9 in train"], step=2)]
    assert [each.step for each in summarize([report(0, findings=several)]).found] == [2, 3, 3, 3, 3]


def test_ranks_that_see_it_in_other_steps():
    late = found(step=5, last_step=9)
    summary = summarize([report(0, findings=[late]), report(1, findings=[found()]), report(2, findings=[late])])
    assert "ranks 0-2, after 3 optimizer steps (first on rank 1), 4 times until step 9\n" in text(summary)


def test_events_and_values_that_differ_are_of_their_ranks():
    reports = [report(rank, 4, events=saves(2, 4), digest="e" if rank == 3 else "d") for rank in range(4)]
    reports[2]["events"] = saves(2)
    for each, step, count in zip(reports, (1, 1, 3, 1), (5, 6, 5, 7), strict=True):
        each["events"]["load"] = saves(step, count=count)["save"]
    reports[0]["events"]["load"]["last"] = saves(9)["save"]["first"]
    summary = summarize(reports)
    assert [(each.kind, each.ranks, each.times, each.steps) for each in summary.events] == [
        ("save", [0, 1, 3], 2, [2, 4]),
        ("save", [2], 1, [2]),
        ("load", [0], 5, [1, 9]),
        ("load", [1], 6, [1]),
        ("load", [2], 5, [3]),
        ("load", [3], 7, [1]),
    ]
    many = _summary.Events("load", [0], 3, [2, 2, 5], [*"abcde"])
    assert _summary.happened(many) == "load (a, b, c, d): 3 times, after steps 2, 5, on rank 0"
    shown = text(summary)
    assert "\ndigest d on ranks 0-2; e on rank 3\n" in shown
    assert "\nsave: 2 times, after steps 2, 4, on ranks 0-1, 3\n" in shown


def test_notes_are_no_findings():
    summary = summarize([report(0, notes=[found("schedule-once")])])
    assert summary.findings == [] and len(summary.found) == 1
    assert "if that is meant: MEGAPATCH_AUDIT_ACCEPT=schedule-once" in text(summary)


WHOLE = """\
1 finding and 1 note in 10 optimizer steps on ranks 0-1
megapatch 0.1.0, digest d, number of ranks 2, settings every 50, raises False, accepted none
optimizer steps 10 on rank 0; 9 on rank 1
written before the end of the process: rank 1

stepped-once: ranks 0-1, after 3 optimizer steps (first on rank 0), 2 times until step 9
  rank 0: the optimizer steps again
  rank 1: it stepped
  Damage.
  since the step before: a load; a save
  at c
  at b
  at a
  likely causes, in order, and what shows each:
    1. a loop
       - it turns
  patches for known causes that are not in place here: a.patch (switched off), b.patch (failed)

resumed (a note): rank 1, after 3 optimizer steps, 2 times until step 3
  the optimizer steps again
  Damage.
  if that is meant: MEGAPATCH_AUDIT_ACCEPT=resumed

kept: fresh-gradients (7 steps, no reads)
not watched: schedule-once (no schedule) on rank 0
"""


def test_a_whole_text():
    where, before = ["main", "a", "b", "c"], ["a load", "a save"]
    again = found(where=where, before=before, count=2)
    other = found(what="it stepped", where=where, step=5, last_step=9, count=1)
    other["patches"] = [{"name": "b.patch", "reason": "failed"}]
    bare = found("resumed", last_step=3, count=2, where=[], causes=[], patches=[])
    kept = {"name": "fresh-gradients", "status": "kept", "reason": "", "counts": {"steps": 7, "reads": 0}}
    broken = {"name": "stepped-once", "status": "broken", "reason": ""}
    noted = {"name": "resumed", "status": "kept", "reason": "", "counts": {"pauses": 1}}
    blind = {"name": "schedule-once", "status": "not watched", "reason": "no schedule"}
    ranks = [
        report(0, 2, [again], rules=[kept, broken, blind, noted]),
        report(1, 2, [other], [bare], rules=[kept, broken], steps=9, ended=False),
    ]
    assert text(summarize(ranks)) == WHOLE.removesuffix("\n")
    assert "\n  patches for known causes that are not\n    in place here: " in texts(summarize(ranks), 40)[0]
    assert "before the end" not in text(summarize(ranks[:1])) and summarize([*ranks, report(2, 3)]).size == 3


def test_the_page_shows_what_is_printed():
    """But for the parts that it leaves out, and the width."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    block = page.partition("$ megapatch audit FOLDER\n")[2].partition("```")[0]
    weights = (
        "module.embedding.word_embeddings.weight and 51 more are not what the optimizer's main parameters say, "
    )
    cause = RULES["main-params-agree"].causes[0]
    note = found(
        "main-params-agree",
        f"{weights}which overwrite the model's",
        means=RULES["main-params-agree"].means,
        step=9,
        last_step=16,
        count=3,
        where=["trainer.py:43 in train"],
        before=["load at trainer.py:41 in train"],
        causes=[{"cause": cause.cause, "check": cause.check}],
        patches=[],
    )
    events = {"load": saves(14, 15)["save"], **saves(6, 12, 18, 30)}
    events["exception"] = saves(3)["save"]
    events["exception"]["first"][0]["what"] = "Interrupted"
    settings = {"every": 1, "raises": False, "accepted": []}
    ranks = [
        report(
            rank,
            2,
            [found(what="one"), found("resumed")],
            [note | {"step": 10 - rank}, found("schedule-once")],
            events,
            steps=30,
            digest="6d0a2ad9ef79f92a",
            settings=settings,
        )
        for rank in range(2)
    ]
    printed = " ".join(text(summarize(ranks)).split())
    parts = [" ".join(part.split()) for part in block.split("...\n")]
    assert [part for part in parts if part not in printed] == []
    kept = {"name": "fresh-gradients", "status": "kept", "reason": "", "judged": 1200}
    kept["judges"] = RULES["fresh-gradients"].judges
    (judged,) = summarize([report(0, 1, rules=[kept])]).to_dict()["rules"]["kept"]
    assert f"`{judged}`" in page


# ------------------------------------------------------------------------ the command
def test_exit_codes(tmp_path):
    shown = run("audit", str(tmp_path))
    assert (shown.returncode, shown.stdout) == (2, "") and "holds no audit-*.json" in shown.stderr
    assert run("audit", str(tmp_path / "missing")).returncode == 2
    write(tmp_path, report(0, 2, notes=[found("schedule-once")]), report(1, 2))
    assert run("audit", str(tmp_path)).returncode == 0
    write(tmp_path, report(0, 3))
    shown = run("audit", str(tmp_path))
    assert shown.returncode == 2 and f"rank 2 left no file in {tmp_path}" in shown.stderr
    write(tmp_path, report(0, 3), report(1, 3), report(2, 3, ended=False))
    shown = run("audit", str(tmp_path))
    assert shown.returncode == 2 and "written before the end of the process: rank 2" in shown.stdout
    (tmp_path / "audit-00002.json").unlink()
    write(tmp_path, report(0, 3, findings=[found()]))
    shown = run("audit", "--json", str(tmp_path))
    data = json.loads(shown.stdout)
    assert shown.returncode == data["exit_code"] == 1
    assert [each["rule"] for each in data["found"]] == ["stepped-once"] and len(data["unreadable"]) == 1
    shown = run("audit", str(tmp_path), "--html", str(tmp_path / "no folder" / "page.html"))
    assert shown.returncode == 2 and "cannot be written: No such file or directory" in shown.stderr


def test_the_page_may_go_to_a_device(tmp_path):
    write(tmp_path, report(0, 1))
    shown = run("audit", str(tmp_path), "--html", "/dev/stdout")
    assert shown.returncode == 0 and shown.stdout.rstrip().endswith("</html>")
    before = os.stat(os.devnull)
    assert run("audit", str(tmp_path), "--html", os.devnull).returncode == 0
    assert os.path.samestat(os.stat(os.devnull), before) and stat.S_ISCHR(before.st_mode)


def test_an_attempt_before_a_restart_is_kept_apart(tmp_path):
    write(tmp_path, report(0, 2, [found()], ended=False, began=1.0), report(1, 2, ended=False, began=1.1))
    for file in tmp_path.iterdir():
        file.rename(file.with_stem(f"{file.stem}-1"))
    write(tmp_path, report(0, 2, began=5.0), report(1, 2, began=5.1))
    shown = run("audit", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert shown.returncode == 1
    for said in (shown.stdout, (tmp_path / "page.html").read_text()):
        assert "attempt 1 of 2: 1 finding in 10 optimizer steps on ranks 0-1" in said
        assert "attempt 2 of 2: nothing found in 10 optimizer steps on ranks 0-1" in said
    data = json.loads(run("audit", "--json", str(tmp_path)).stdout)
    assert data["found"] == [] and [each["rule"] for each in data["earlier"][0]["found"]] == ["stepped-once"]
    assert data["unreadable"] == []


def test_an_attempt_that_was_killed_is_not_made_well_by_a_clean_one_after_it(tmp_path):
    """The second has the same port, and the first has left no file of rank 1."""
    write(tmp_path, report(0, 2, ended=False, began=1.0, seconds=2.0))
    (tmp_path / "audit-00000.json").rename(tmp_path / "audit-00000-1.json")
    write(tmp_path, report(0, 2, began=5.0), report(1, 2, began=4.0, seconds=3.0))
    summary, unreadable = read(tmp_path)
    assert [attempt.ranks for attempt in summary.attempts] == [[0], [0, 1]]
    assert unreadable == [f"attempt 1 of 2: rank 1 left no file in {tmp_path}"]
    write(tmp_path, report(0, 1, began=5.0))
    (tmp_path / "audit-00001.json").unlink()
    (tmp_path / "audit-00000-1.json").write_text(json.dumps(report(0, 1, ended=False, began=1.0)))
    shown = run("audit", str(tmp_path))
    assert shown.returncode == 2 and "attempt 1 of 2" in shown.stdout and not shown.stderr


def test_two_models_of_a_job_are_kept_apart_and_a_rank_that_left_nothing_borrows_no_other_report():
    worlds = [report(rank, 2, world=world, began=rank) for rank in range(2) for world in "ab"]
    assert [attempt.ranks for attempt in summarize(worlds).attempts] == [[0, 1], [0, 1]]
    assert [attempt.ranks for attempt in summarize(worlds[:-1]).attempts] == [[0, 1], [0]]


def test_a_kept_rule_counts_each_half():
    counts = {"losses": 32, "divisors": 0}
    rule = {"name": "tokens-counted", "status": "kept", "reason": "", "judged": 32, "counts": counts}
    shown = text(summarize([report(0, 2, rules=[rule], settings=None)]))
    assert shown.endswith("kept: tokens-counted (32 losses, no divisors)") and ", settings none\n" in shown


def test_a_kept_rule_has_the_count_of_the_rank_that_has_judged_fewest():
    rules = [
        {"name": "resumed", "status": "kept", "reason": "", "judged": n, "judges": "pauses"} for n in (7, 1200)
    ]
    ranks = summarize([report(rank, 2, rules=[rule]) for rank, rule in enumerate(rules)])
    assert "kept: resumed (7 pauses)" in text(ranks)


BAD = {
    "truncated": json.dumps(report(1, 2, [found()]))[:200],
    "empty": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "not text": b"\xff\xfe\x00",
    "another layout": json.dumps({**report(1, 2), "schema": 2}),
    "without findings": json.dumps({key: value for key, value in report(1, 2).items() if key != "findings"}),
    "a finding that is none": json.dumps(report(1, 2) | {"findings": ["x"]}),
    "steps in words": json.dumps(report(1, 2) | {"steps": "many"}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_and_the_others_count(tmp_path, name):
    write(tmp_path, report(0, 2, findings=[found()]))
    bad = BAD[name]
    (tmp_path / "audit-00001.json").write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    summary, unreadable = read(tmp_path)
    assert summary.ranks == [0] and len(summary.findings) == 1
    assert f"{tmp_path}/audit-00001.json cannot be read: " in unreadable[0]


def lacking(data):
    """Yield copies of some data, each without one of its keys."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield {name: item for name, item in data.items() if name != key}
            yield from ({**data, key: less} for less in lacking(value))
    elif isinstance(data, list) and data:
        yield from ([less] for less in lacking(data[0]))


def test_a_report_that_lacks_something_is_shown_unless_it_is_refused():
    for less in lacking(report(0, 1, [found()], [found()], saves(1))):
        try:
            checked = _summary.checked(less)
        except KeyError:
            continue
        assert text(_summary.summarize([[{**checked, "rank": 0, "size": 1}]]))


def test_rules_and_keys_of_another_version_are_shown(tmp_path):
    newer = report(1, 2, [found("a-new-rule", new_key=1)], version="0.9.0", new_key=[])
    write(tmp_path, report(0, 2, events={"offload": saves(1)["save"]}), newer)
    shown = run("audit", str(tmp_path))
    assert shown.returncode == 1
    assert "megapatch 0.1.0 on rank 0; 0.9.0 on rank 1" in shown.stdout and "a-new-rule: rank 1" in shown.stdout
    assert "kept: resumed (no things)" in shown.stdout
    assert "offload" in page(*read(tmp_path))


# ------------------------------------------------------------------------ the page
class Parsed(HTMLParser):
    """What a page consists of."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.words = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


NASTY = '<script>alert("x")</script><img src=http://evil/> & \x1b[31m\u202e "quoted\''


def test_the_page_needs_nothing_and_escapes_everything():
    nasty = found(
        NASTY,
        NASTY,
        means=NASTY,
        where=[NASTY],
        causes=[{"cause": NASTY, "check": NASTY}],
        patches=[{"name": NASTY, "reason": NASTY}],
    )
    events = {NASTY: {"count": 1, "first": [{"step": 1, "seconds": 0, "what": NASTY, "where": NASTY}], "last": []}}
    rules = [{"name": NASTY, "status": NASTY, "reason": NASTY}]
    data = report(0, 2, [nasty], events=events, version=NASTY, digest=NASTY, rules=rules)
    html = page(summarize([data]), [NASTY])
    parsed = Parsed(html)
    assert parsed.open == [] and not {"script", "img", "link", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert "url(" not in html and "@import" not in html and "\x1b" not in html and "\u202e" not in html
    assert sum(words.count("<script>") for words in parsed.words) > 10  # as text
    assert "prefers-color-scheme: dark" in html


def test_the_page_has_the_timeline():
    html = page(summarize([report(0, findings=[found()], events=saves(2, 10))]), ["rank 7 left no file"])
    assert html.count("<pre>rank 7 left no file</pre>") == 1
    assert '<i class="finding" style="left:30.0%;width:40.0%"></i>' in html
    assert '<i class="event" style="left:20.0%;width:0.0%"></i><i class="event" style="left:100.0%' in html
    assert Parsed(page(summarize([report(0, 1, events=saves(0), steps=0)]), [])).open == []
