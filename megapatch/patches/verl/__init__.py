"""Patches for verl."""
