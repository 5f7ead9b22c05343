"""Patches for slime and for miles, which shares its code."""
