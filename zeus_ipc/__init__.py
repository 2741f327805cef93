"""What a training job and zeusd share: messages, errors and the client. No root, no NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus_ipc._version import __version__

if TYPE_CHECKING:
    from zeus_ipc.client import Client

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the client, and ZeroMQ with it, on first use."""
    if name == "Client":
        from zeus_ipc.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
