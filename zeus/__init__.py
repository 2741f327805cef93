"""Energy measurement and optimization for training jobs, without root."""

from zeus import compat
from zeus_ipc._version import __version__

__all__ = ["__version__"]

compat.install()
