"""Names that scripts for earlier versions of ml-energy/zeus import from here."""

from zeus.run.console import FileAndConsole

__all__ = ["FileAndConsole"]
