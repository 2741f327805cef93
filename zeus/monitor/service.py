"""Requests to a third-party web service, with the user's own key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeus.exceptions import ZeusBaseError


class ServiceError(ZeusBaseError):
    """A service cannot be reached, or refuses the request."""


class JsonService:
    """A service that answers with JSON.

    Args:
        name: Its name, for messages.
        url: Where it is.
        timeout_s: Time to wait for it.
    """

    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def get(
        self,
        path: str,
        parameters: Mapping[str, str | float],
        headers: Mapping[str, str],
        hint: str,
    ) -> Any:
        """Returns its answer.

        Args:
            path: Path of the request.
            parameters: Query parameters.
            headers: Headers.
            hint: What to do if it refuses.

        Raises:
            ServiceError: It cannot be reached, refuses, or does not answer with JSON. The message
                contains no key.
            ImportError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError:
            raise ImportError(
                f"{self._name} is asked with httpx, which is not installed: "
                "pip install 'zeusd[carbon]'"
            ) from None
        try:
            answer = httpx.get(
                f"{self._url}/{path}".rstrip("/"),
                params=dict(parameters),
                headers=dict(headers),
                timeout=self._timeout_s,
                follow_redirects=True,
            )
        except (httpx.HTTPError, httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            raise ServiceError(
                f"{self._name} cannot be reached at {self._url} ({type(error).__name__})"
            ) from None
        if answer.is_error:
            raise ServiceError(f"{self._name} refuses ({answer.status_code}); {hint}")
        try:
            return answer.json()
        except ValueError:
            raise ServiceError(f"{self._name} at {self._url} does not answer with JSON") from None
