"""Findings of the audit in correct programs: false alarms, by program, with the rules that raise them."""

from __future__ import annotations

FALSE_ALARMS: dict[str, tuple[str, ...]] = {}
