"""Pause and resume generation, in parts: for `paused_generation`, and for patches of frameworks' own syncs."""
