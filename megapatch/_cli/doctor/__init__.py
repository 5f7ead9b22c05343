"""megapatch doctor: the packages that are installed, the status of every patch, and why."""

from .command import EXIT_CODES, compare, doctor

__all__ = ["EXIT_CODES", "compare", "doctor"]
