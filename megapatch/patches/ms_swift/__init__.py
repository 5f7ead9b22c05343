"""Patches for ms-swift (Megatron-SWIFT)."""
