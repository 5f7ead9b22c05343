"""Where torch or megatron.core is missing, there is nothing to test here, and the run says so."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = [] if find_spec("torch") else ["torch"]
if not MISSING:
    from megapatch.testing import megatron_core_available

    if not megatron_core_available():
        MISSING.append("megatron.core")

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"tests/testing: not run, because there is no {MISSING[0]}" if MISSING else "tests/testing: run"
