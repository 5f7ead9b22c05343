"""Patches for Megatron-LM itself."""
