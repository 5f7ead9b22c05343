"""For tests that let the audit find something in their own process."""

from __future__ import annotations

import pytest

from megapatch import audit


@pytest.fixture
def nothing_left():
    yield
    audit.clear()
