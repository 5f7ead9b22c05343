"""docs/limits.md: the section "Limits" of every patch's docstring, and what holds for all of megapatch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

from megapatch import patches
from megapatch.patch import Patch

INTRODUCTION = Path(__file__).with_name("limits_introduction.md")
WIDTH = 115
"""Columns of a docstring. A line that ends before them ends a paragraph."""

FAMILIES = {
    "megatron": "Megatron-LM and Megatron-Bridge",
    "slime": "slime and miles",
    "skyrl": "SkyRL",
    "nemo_rl": "NeMo-RL",
    "verl": "verl",
    "ms_swift": "ms-swift",
    "areal": "AReaL",
    "roll": "ROLL",
}
"""In the order of the pages."""


class Section(NamedTuple):
    """One section "Limits": the first line of the docstring that it is in, and its paragraphs."""

    title: str
    paragraphs: list[str]


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.read_text().rstrip()]
    for family, title in FAMILIES.items():
        parts.append(f"## {title}")
        for patch in patches.PATCHES:
            if patch.family == family:
                parts.append(f"### {patch.name}")
                for section in limits(patch):
                    items = (f"- {sentence(text)}" for each in section.paragraphs for text in _in_parts(each))
                    parts += [markdown(section.title), "\n".join(items)]
                if patch.leaves:
                    lines = [f"- `{attribute}`: {markdown(reason)}." for attribute, reason in patch.leaves]
                    parts += ["After a normal call these differ:", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def limits(patch: Patch) -> list[Section]:
    """The sections "Limits" of a patch: a site with a docstring of its own has one, too."""
    return sections(patch.doc, "Limits")


def sections(doc: str, name: str) -> list[Section]:
    """The sections of this name in a docstring."""
    lines = inspect.cleandoc(doc).splitlines()
    found: list[Section] = []
    title, inside = "", False
    for number, line in enumerate(lines):
        heading = re.match(r"([A-Z]\w+)  +(?=\S)", line)
        if heading:
            inside = heading[1] == name
            if inside:
                found.append(Section(title, [line[heading.end() :]]))
        elif not line.startswith("  "):
            title, inside = line or title, False
        elif inside:
            paragraphs = found[-1].paragraphs
            if _ends_a_paragraph(lines[number - 1], line):
                paragraphs.append(line.strip())
            else:
                paragraphs[-1] += f" {line.strip()}"
    return found


def _in_parts(text: str) -> list[str]:
    """Return a paragraph, or its sentences if it has more than five lines."""
    return [text] if len(text) <= 5 * WIDTH else re.split(r"(?<=[a-z)`\d]\.) (?=[A-Z`])", text)


def _ends_a_paragraph(line: str, following: str) -> bool:
    return line.endswith(".") and len(line) + 1 + len(following.split()[0]) <= WIDTH


def sentence(text: str) -> str:
    """As Markdown, and with a capital letter, unless it begins with the name of something."""
    first = text.split()[0]
    name = not first.isalpha() or first in ("slime", "miles", "megapatch")
    return markdown(text if name else text[0].upper() + text[1:])


def markdown(text: str) -> str:
    """Plain text as Markdown, which shows it as it is; what is in backticks stays code."""
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<>\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts
    )
