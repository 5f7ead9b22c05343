"""Other copies of megapatch in this process, such as a vendored one: two would patch everything twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from .._troubleshooting import see
from . import watch

log = logging.getLogger("megapatch")


def take_over(finders: Iterable[Any]) -> bool:
    """Have other copies retire; return False if one could not, so that this copy has to stay off.

    Args:
        finders: of the other copies, from `watch.other_copies`.
    """
    for finder in finders:
        home = os.path.dirname(os.path.dirname(finder.home))
        try:
            finder.retire()
        except Exception as error:
            log.warning(
                "megapatch was loaded twice, and what the copy in %s has patched cannot be restored (%s: %s): "
                "this one stays off" + see("stays-off"),
                *(home, type(error).__name__, error),
            )
            return False
        watch.remove(finder)
        log.warning(
            "megapatch was loaded twice: this copy takes over from the one in %s" + see("loaded-twice"),
            home,
        )
    return True
