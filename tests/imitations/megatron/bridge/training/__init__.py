"""Imitation, see megatron/bridge/__init__.py."""
