"""Energy measurement and optimization for training jobs, without root."""

from zeus import compat
from zeus_common.installed import overlap
from zeus_ipc._version import __version__

__all__ = ["__version__"]

compat.install()

if (_problem := overlap(__path__[0])) is not None:
    from zeus.utils.warn import warn

    warn(_problem)
