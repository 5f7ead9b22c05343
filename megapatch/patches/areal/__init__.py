"""Patches for AReaL."""
