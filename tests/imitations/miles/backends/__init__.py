"""Imitation, see miles/__init__.py."""
