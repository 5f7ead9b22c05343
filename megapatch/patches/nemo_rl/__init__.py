"""Patches for NeMo-RL."""
