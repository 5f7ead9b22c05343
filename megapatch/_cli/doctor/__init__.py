"""megapatch doctor: the packages that are installed, the status of every patch, and why."""

from .command import EXIT_CODES, compare, doctor
from .examination import COULD_NOT_LOOK, WELL
from .probe import SECONDS

__all__ = ["COULD_NOT_LOOK", "EXIT_CODES", "SECONDS", "WELL", "compare", "doctor"]
