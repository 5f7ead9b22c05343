"""Patches for ROLL."""
