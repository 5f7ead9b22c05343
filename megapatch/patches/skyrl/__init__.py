"""Patches for SkyRL, old package and new."""
