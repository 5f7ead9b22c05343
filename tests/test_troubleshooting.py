"""docs/troubleshooting.md has an entry for each WARNING and ERROR that megapatch logs, and for nothing else.

Each message ends with the address of its entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megapatch
from megapatch._engine.complaints import complaints, unknown_variables
from megapatch._engine.record import Record
from megapatch._engine.settings import Settings
from megapatch._version import see
from megapatch.audit._settings import bad_values
from megapatch.patch import Status

PACKAGE = Path(megapatch.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"

LEVELS = ("warning", "error", "exception", "critical")
# Functions that log what they are called with: the position of the text, how it goes on in the log, the position
# of what makes the anchor, and what that begins with.
LOG_THEIR_ARGUMENT = {
    "tell_besides": (0, ": ... (after ...)", 3, ""),
    "self._warn": (0, "", None, ""),
    "warn": (1, "", 0, "train-"),
}
# What other functions make, or log for those above.
MADE_ELSEWHERE = {
    "%s": [
        *(f"NAME: MODULE is {status.value}: REASON" for status in Status if status.needs_attention),
        *unknown_variables({"MEGAPATCH_DISABLED": "x"}),
        *complaints(Settings(strict_value="perhaps", without_audit=("MEGAPATCH_AUDIT_EVERY",)), []),
        *complaints(Settings(disable=("xyz",)), ["a.patch"]),
        *bad_values({"MEGAPATCH_AUDIT_EVERY": "x", "MEGAPATCH_AUDIT_ACCEPT": "x"}),
    ],
    "audit: %s": ["audit: FINDING"],
    "%s (after %s)": [],
}


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """A text, with `...` in place of what an f-string puts in; a name in braces where it has none."""
    if isinstance(node, ast.BinOp):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "see":
        return see(text_of(node.args[0], constants))
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, {}) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return (
        str(node.value)
        if isinstance(node, ast.Constant)
        else constants.get(name := ast.unparse(node), f"{{{name}}}")
    )


def logged() -> Iterator[tuple[str, str]]:
    """The formats and texts of all calls that log at WARNING or above, and the anchor that each ends with."""
    for text in with_addresses():
        message, _, address = text.partition(see("").removesuffix(")"))
        yield message, address.removesuffix(")")


def with_addresses() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            called = ast.unparse(call.func)
            logger, _, method = called.rpartition(".")
            if method in LEVELS and re.search("log", logger, re.IGNORECASE):
                yield text_of(call.args[0], constants)
            elif called in LOG_THEIR_ARGUMENT:
                position, rest, address, begins = LOG_THEIR_ARGUMENT[called]
                anchor = "" if address is None else see(begins + text_of(call.args[address], constants))
                yield text_of(call.args[position], constants) + rest + anchor


def messages() -> set[str]:
    """Return the messages that users find in a log; `...` stands for what differs."""
    found = {message for text, _ in logged() for message in MADE_ELSEWHERE.get(text, [text])}
    return {as_in_the_log(message) for message in found}


def as_in_the_log(text: str) -> str:
    return re.sub("%[sdgr]", "...", text)


def entries() -> dict[str, re.Pattern[str]]:
    """The page's entries by their headings, in which `...` stands for anything."""
    headings = re.findall("^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
    return {text: re.compile(re.escape(text).replace(r"\.\.\.", ".*"), re.DOTALL) for text in headings}


def entry_of(message: str) -> str | None:
    """The entry in which a user finds a message: of several that fit, the one that says most."""
    fitting = [text for text, pattern in entries().items() if pattern.fullmatch(message)]
    return max(fitting, key=len, default=None)


def test_what_is_made_elsewhere_is_logged():
    assert MADE_ELSEWHERE.keys() <= {text for text, _ in logged()}


def test_every_message_has_an_entry_and_every_entry_a_message():
    found = {message: entry_of(message) for message in messages()}
    assert [message for message, entry in found.items() if entry is None] == []
    assert set(found.values()) == entries().keys()


def test_every_entry_says_what_to_do():
    for text in re.split("^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        assert text.count("\n\n**Do:** ") == 1, text


def anchors() -> dict[str, str]:
    """The anchors of the page's entries, by their headings."""
    found = re.findall('^<a id="(.+)"></a>\n\n### `(.+)`$', PAGE.read_text(), re.MULTILINE)
    assert len({anchor for anchor, _ in found}) == len(found)
    return {heading: anchor for anchor, heading in found}


def test_every_message_ends_with_the_address_of_its_entry():
    known = anchors()
    for text, anchor in logged():
        if text not in MADE_ELSEWHERE:
            assert anchor == known[entry_of(as_in_the_log(text))], text
    assert ("%s", "settings") in set(logged())
    assert "\n## Settings\n" in PAGE.read_text()


@pytest.mark.parametrize("status", [status for status in Status if status.needs_attention])
def test_a_status_that_needs_attention_has_the_address_of_its_entry(caplog, status):
    Record("a.patch", "module", (), None).set(status, "reason", "Traceback:\n  line")
    first, *_ = caplog.messages[0].splitlines()
    assert first.endswith(see(status.value))
    assert status.value in anchors().values()
