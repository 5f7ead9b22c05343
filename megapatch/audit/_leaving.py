"""The report that a rank leaves in the folder MEGAPATCH_REPORT, for `megapatch audit FOLDER`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from .._engine.settings import REPORT
from .._reporting import files
from .._troubleshooting import see
from ._report import AuditReport
from ._summary import KIND

log = logging.getLogger("megapatch")


class Leaving:
    """Leaves the report of this process, if there is a folder for it; a failure is logged, once."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._has_failed = False

    def leave(self, make: Callable[[], AuditReport]) -> None:
        """Write the report as it is now, over the one before. Never raises."""
        folder = os.environ.get(REPORT)
        if not folder or os.getpid() != self._process:  # a forked child would write over its parent's
            return
        try:
            report = make()
            files.write(files.path_of(Path(folder), KIND, report.rank), report.to_dict())
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                reason = f"{type(error).__name__}: {error}"
                log.warning(
                    "audit: no report is left in %s: %s; training goes on" + see("audit-report"), folder, reason
                )
