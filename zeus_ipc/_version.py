"""The version of the distribution; defined only here."""

__version__ = "0.1.0"
