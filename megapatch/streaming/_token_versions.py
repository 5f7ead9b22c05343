"""Versions of samples whose generation went on across weight syncs."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, Literal, TypeAlias, get_args

from ..errors import MisuseError

TokenStaleness: TypeAlias = Literal["oldest", "mean"]
TOKEN_STALENESS: tuple[str, ...] = get_args(TokenStaleness)


def versions_of(key: Hashable, runs: Any, staleness: TokenStaleness) -> tuple[int, int]:
    """Return the version that counts for staleness, and the newest.

    Args:
        key: of the sample, for the error.
        runs: pairs of a version and the number of tokens that it made, in any order.
        staleness: what counts: the "oldest" token, or the "mean" of all tokens, rounded down.

    Raises:
        MisuseError: these are no such pairs, or there are none.
    """
    try:
        pairs = [(operator.index(version), operator.index(tokens)) for version, tokens in runs]
    except (TypeError, ValueError):
        pairs = []
    versions = [version for version, tokens in pairs if tokens]  # a pause may come before the first token
    if not versions or min(tokens for _, tokens in pairs) < 0:
        raise MisuseError(
            f"sample {key!r} has weight_versions={runs!r} in its tag; expected a list of pairs, each of a version "
            "and the number of tokens sampled from it"
        )
    if staleness == "oldest":
        return min(versions), max(versions)
    mean = sum(version * tokens for version, tokens in pairs) // sum(tokens for _, tokens in pairs)
    return mean, max(versions)
