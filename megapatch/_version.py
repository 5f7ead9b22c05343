"""The version of megapatch; setup.cfg reads it from here."""

__version__ = "0.1.0"
