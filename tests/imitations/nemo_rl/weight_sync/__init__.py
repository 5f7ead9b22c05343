"""Imitation, see nemo_rl/__init__.py."""
