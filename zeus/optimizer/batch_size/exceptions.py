"""The exceptions of the batch size optimizer."""

from __future__ import annotations

from zeus.exceptions import ZeusBaseError


class ZeusBSOError(ZeusBaseError):
    """Base of these."""


class ZeusBSORuntimeError(ZeusBSOError):
    """The server, or the file, refused or cannot be used.

    Attributes:
        status: HTTP status of the refusal; 0 without a reply.
        public: A message for anyone: without hosts, users and paths.
    """

    def __init__(self, message: str, status: int = 0, public: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.public = message if public is None else public


ZeusBSORuntimError = ZeusBSORuntimeError
"""As ml-energy/zeus spells it."""


class ZeusBSOTrainFailError(ZeusBSOError):
    """A run was stopped before it reached its target."""


class ZeusBSOConfigError(ZeusBSOError, ValueError):
    """The job, or the GPUs, are not valid."""


class ZeusBSOOperationOrderError(ZeusBSOError):
    """A method was called before another that has to come first."""


class ZeusBSOBadOperationError(ZeusBSOError):
    """A method was called where it is not allowed, as on a rank other than 0."""
