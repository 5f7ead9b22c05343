"""Shared by tests: real Megatron, the frameworks' own code, and stand-ins for what cannot be installed."""
