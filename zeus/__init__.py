"""Energy measurement and optimization for training jobs, without root."""

from zeus import compat
from zeus_ipc._version import __version__
from zeus_ipc.installed import overlap

__all__ = ["__version__"]

compat.install()

if (_problem := overlap(__path__[0])) is not None:
    from zeus.utils.warn import warn

    warn(_problem)
