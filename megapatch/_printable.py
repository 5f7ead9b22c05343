"""The one rule for text that leaves megapatch: no secret, and no character that moves a cursor or forges a line.

Exceptions, names and settings are other people's text. The terminal (`_reporting.terminal`), the log, JSON and
reports for issues send theirs through here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Stands for a value that may be secret."""

_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"  # a word, after an escaped line end as well: repr() has those
_HEADER = r"\bauthorization\\*['\"]?\s*[:=]"
_SECRETS = (
    # Keys of known shape: private keys, GitHub, GitLab, Hugging Face, OpenAI and kin, NVIDIA, Slack, AWS, Google,
    # PyPI, npm, Weights & Biases, JSON web tokens.
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$(?!\n))", HIDDEN),
    (
        _BEGINS + r"(?:gh[a-z]_|github_pat_|gl[a-z]{2,8}-|hf_|api_org_|sk-|nvapi-|xox[a-z]-|xapp-|pypi-|npm_"
        r"|wandb_v\d_)[\w-]{16,}",
        HIDDEN,
    ),
    (
        _BEGINS + r"(?:A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
        r"|eyJ[\w-]{8,1024}\.[\w-]{8,}(?:\.[\w-]*)?)",  # with a bound, as each may begin in the one before
        HIDDEN,
    ),
    # Whatever the scheme: all up to the end of the quotation or line, which may be the next one, or to another
    # header. Escaped line ends are some too, perhaps escaped again.
    (
        rf"(?i)({_HEADER} *)(?:\s|\\{{1,8}}[nrt])*(?:(\\*['\"])(?:(?!\2).)*|(?:(?!\\{{1,8}}n|{_HEADER})[^\n])+)",
        rf"\g<1>\g<2>{HIDDEN}",
    ),
    (r"(?i)(\bbearer\s+)[\w.~+/=-]{16,}", rf"\g<1>{HIDDEN}"),
)

# The ends of names of what is secret: in capitals as environment variables have them; in small letters only what
# cannot be a key of a state dict or a token of a vocabulary.
_NAME = (
    _BEGINS + r"(?:(?:[A-Z0-9]{0,20}(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY)|KEY|CREDENTIAL|AUTH)"
    r"S?(?:_[A-Z0-9_]{1,20})?"
    r"|(?i:(?:(?:api|access|secret|private|auth|account|signing|encryption|service)[_-]?(?:key|token)"
    r"|(?:hf|hub|github|gitlab|wandb|refresh|session|csrf|bot)[_-]?token|password|passwd|passphrase|secret"
    r"|credential)s?))(?![A-Za-z0-9_])"
)
_SHORT = r"(?i:token|auth|pass|pwd)"  # of an option, or of an argument that is a text: nobody's key
_OPTION = rf"(?<!\w)--?(?:[\w-]{{0,20}}[_-])?(?:{_NAME}|{_SHORT}(?![\w-]))"
_VALUE = (
    r"""\\+"(?:[^\\"]|\\+(?![\\"])|(?<!\\)")*\\+"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S*[^\s'")\]},;.:]|\S+"""
)
_NAMED = (
    rf"""({_NAME}\\*['"]?\s*(?:=>|[:=])\s*|{_OPTION}(?:\s+|\\*['"],\s*)(?!\\*['"]?-)"""
    rf"""|(?<![\w.]){_SHORT}\s*=\s*(?=\\*['"][^<\['"]))(?:{_VALUE})"""
)
# Of other variables in capitals, as DB_PASS, only what is known to be harmless stays.
_HARMLESS = r"""\\*['"]?(?:-?[\d.]+|(?i:true|false|yes|no|on|off|none)|\*\*\*)(?:[\s'")\]},;\\]|$)"""
_KNOWN = "CUDA|GLOO|LD|MASTER|MEGAPATCH|MEGATRON|NCCL|NVTE|OMP|PYTHON|PYTORCH|RAY|TORCH|TORCHELASTIC|TRITON|UCX"
_VARIABLE = (
    rf"""((?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))(?!(?:{_KNOWN})_)[A-Z][A-Z0-9]{{0,30}}(?:_[A-Z0-9]{{1,30}}){{1,9}}"""
    rf"""(?:=|\\*['"]\s*[:=]\s*))(?!{_HARMLESS})(?:{_VALUE})"""
)
_USER = r"[^/@:?#]*:|[^/?#]*@"
_AFTER_A_VALUE = ")]}>'\",.:"
"""Characters at the end of a value that rather belong to the text around the URL."""


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern when the first text is printed, not when megapatch is imported."""
    return re.compile(pattern, re.DOTALL)


def clean(text: str) -> str:
    """Return text that may be printed: without secrets, and with every control character but line ends escaped."""
    return _escaped(without_secrets(text.replace("\r\n", "\n")), keep="\n")


def one_line(text: str) -> str:
    """Return text that may be printed in one line: `clean`, and line ends are escaped as well."""
    return _escaped(without_secrets(text))


def first_line_at_the_margin(text: str) -> str:
    """Return `clean` text whose later lines are indented, so that none can pass for a message of its own."""
    first, *others = clean(text).split("\n")
    if any(line[:1] not in ("", " ") for line in others):  # all of them, to keep the levels of a traceback
        others = [f"  {line}" if line else "" for line in others]
    return "\n".join([first, *others])


def clean_data(value: Any) -> Any:
    """Return a copy of JSON-ready data without secrets in its texts. JSON itself escapes control characters."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: clean_data(item) for name, item in value.items()}
    return [clean_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def cut(text: str, limit: int) -> str:
    """Return a text in one line of at most `limit` characters; hide secrets first, so that none is cut in two."""
    text = one_line(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def without_secrets(text: str) -> str:
    """Return the text without credentials, tokens, values of URLs' queries, those with a name for secrets, and
    those of variables in capitals, unless name or value is known to be harmless.

    Idempotent.
    """
    if "://" in text:
        text = _compiled(r"\S+").sub(lambda word: _without_credentials(word[0]), text)
    for pattern, put in _SECRETS:
        text = _compiled(pattern).sub(put, text)
    if "://" in text:
        text = _compiled(r"\S+").sub(lambda word: _without_query(word[0]), text)
    for pattern in (_NAMED, _VARIABLE):
        text = _compiled(pattern).sub(rf"\g<1>{HIDDEN}", text)
    return text


def _without_credentials(word: str) -> str:
    """Return a word without the user and password of each URL in it.

    A password may hold "/", "@" and "#", so with a colon all up to the last "@" goes.
    """
    last, begin, kept = word.rfind("@"), 0, []
    while 0 <= (found := word.find("://", begin)) < last:
        kept.append(word[begin : found + 3])
        begin = found + 3
        if user := _compiled(_USER).match(word, begin, last + 1):
            begin = last + 1 if user[0].endswith(":") else user.end()
    return "".join([*kept, word[begin:]])


def _without_query(word: str) -> str:
    """Return a word without the values behind the first "?" or "#" of the URL in it."""
    if (found := word.find("://")) < 0 or not (query := _compiled("[?#]").search(word, found)):
        return word
    parts = _compiled("([&;#])").split(word[query.start() :])
    for number in range(0, len(parts), 2):
        part, end = parts[number], (parts[number + 1 : number + 2] or [""])[0]
        mark = "=" if "=" in part else "?" if end != "&" else ""
        before, found_mark, value = part.partition(mark) if mark else (part, "", "")
        if value:
            after = value[max(1, len(value.rstrip(_AFTER_A_VALUE))) :]
            parts[number] = f"{before}{found_mark}{HIDDEN}{after}"
    return word[: query.start()] + "".join(parts)


def _escaped(text: str, keep: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escape(character) for character in text
    )


def _escape(character: str) -> str:
    return " " if character == "\t" else character.encode("unicode_escape").decode()


def clean_record(record: logging.LogRecord) -> bool:
    """Log filter: clean a message and its traceback. Never raises, as a handler would report wrong arguments."""
    with contextlib.suppress(Exception):
        message = record.getMessage()
        cleaned = first_line_at_the_margin(message)
        if cleaned != message:
            record.msg, record.args = cleaned, None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:  # which formatters take instead of making their own
            record.exc_text = first_line_at_the_margin(record.exc_text)
    return True
