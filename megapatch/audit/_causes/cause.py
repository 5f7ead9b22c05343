"""A likely cause of a finding."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """A way in which trainers break a rule.

    Attributes:
        cause: what is wrong, in a few words.
        check: what shows that it is this one.
        says: words of the findings that it may explain; "" for all of the rule.
    """

    cause: str
    check: str
    says: str = ""
