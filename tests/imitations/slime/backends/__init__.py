"""Imitation, see slime/__init__.py."""
