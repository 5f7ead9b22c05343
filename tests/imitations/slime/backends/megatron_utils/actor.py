"""Imitation of the module that holds train() and save() by name."""

from .model import save, train

__all__ = ["save", "train"]
