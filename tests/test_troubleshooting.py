"""docs/troubleshooting.md has an entry for each WARNING and ERROR that megapatch logs, and for nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megapatch
from megapatch._engine.settings import Settings, unknown_variables
from megapatch.audit._settings import bad_values
from megapatch.patch import NEEDS_ATTENTION

PACKAGE = Path(megapatch.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"

LEVELS = ("warning", "error", "exception", "critical")
# Functions that log what they are called with: the position of the text, and how it goes on in the log.
LOG_THEIR_ARGUMENT = {"tell_besides": (0, ": ... (after ...)"), "self._warn": (0, ""), "warn": (1, "")}
# What other functions make, or log for those above.
MADE_ELSEWHERE = {
    "%s": [
        *(f"NAME: MODULE is {status.value}: REASON" for status in NEEDS_ATTENTION),
        *unknown_variables({"MEGAPATCH_DISABLED": "x"}),
        *Settings(strict_value="perhaps").complaints([]),
        *Settings(disable=("xyz",)).complaints(["a.patch"]),
        *bad_values({"MEGAPATCH_AUDIT_EVERY": "x", "MEGAPATCH_AUDIT_ACCEPT": "ranks-agree,x"}),
    ],
    "audit: %s": ["audit: FINDING"],
    "%s (after %s)": [],
    "megatron.train-reentry: %s": [],
    "{text}": [],
}


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """A text, with `...` in place of what an f-string puts in; a name in braces where it has none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, {}) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return (
        str(node.value)
        if isinstance(node, ast.Constant)
        else constants.get(name := ast.unparse(node), f"{{{name}}}")
    )


def logged() -> Iterator[str]:
    """The formats and texts of all calls that log at WARNING or above."""
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
                position, rest = LOG_THEIR_ARGUMENT[called]
                yield text_of(call.args[position], constants) + rest


def messages() -> set[str]:
    """Return the messages that users find in a log; `...` stands for what differs."""
    found = {message for text in logged() for message in MADE_ELSEWHERE.get(text, [text])}
    return {re.sub("%[sdgr]", "...", message) for message in found}


def entries() -> dict[str, re.Pattern[str]]:
    """The page's entries by their headings, in which `...` stands for anything."""
    headings = re.findall("^### `(.+)`$", PAGE.read_text(), re.MULTILINE)
    return {text: re.compile(re.escape(text).replace(r"\.\.\.", ".*"), re.DOTALL) for text in headings}


def entry_of(message: str) -> str | None:
    """The entry in which a user finds a message: of several that fit, the one that says most."""
    fitting = [text for text, pattern in entries().items() if pattern.fullmatch(message)]
    return max(fitting, key=len, default=None)


def test_what_is_made_elsewhere_is_logged():
    assert MADE_ELSEWHERE.keys() <= set(logged())


def test_every_message_has_an_entry_and_every_entry_a_message():
    found = {message: entry_of(message) for message in messages()}
    assert [message for message, entry in found.items() if entry is None] == []
    assert set(found.values()) == entries().keys()


def test_every_entry_says_what_to_do():
    for text in re.split("^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        assert text.count("\n\n**Do:** ") == 1, text
