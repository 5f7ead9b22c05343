"""What the audit has found, as tests compare it."""

from __future__ import annotations

from megapatch import audit


def found():
    """Return (invariant, what) of each finding."""
    return [(finding.invariant, finding.what) for finding in audit.findings()]
