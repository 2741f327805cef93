"""What can go wrong around the batch size of recurring jobs."""

from __future__ import annotations

from zeus.exceptions import ZeusBaseError


class ZeusBSOError(ZeusBaseError):
    """Base of these."""


class ZeusBSORuntimeError(ZeusBSOError):
    """The server, or the file, refused or cannot be used.

    Attributes:
        status: HTTP status of the refusal; 0 where there was no answer.
        public: What may be said to who need not be known: without hosts, users and paths.
    """

    def __init__(self, message: str, status: int = 0, public: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.public = message if public is None else public


ZeusBSORuntimError = ZeusBSORuntimeError
"""As ml-energy/zeus spells it."""


class ZeusBSOTrainFailError(ZeusBSOError):
    """A run was given up before it reached its target."""


class ZeusBSOConfigError(ZeusBSOError, ValueError):
    """The job, or the GPUs, cannot be used so."""


class ZeusBSOOperationOrderError(ZeusBSOError):
    """A method was called before another that has to come first."""


class ZeusBSOBadOperationError(ZeusBSOError):
    """A method was called where it may not be, as on a rank other than 0."""
