"""Audits for tests in their own process."""

from __future__ import annotations

import pytest
from rigs.audit import idle_audit

from megapatch import audit


@pytest.fixture
def watching():
    """An audit that sees only what a test shows it."""
    return idle_audit()


@pytest.fixture
def nothing_left():
    yield
    audit.clear()
