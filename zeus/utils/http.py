"""Error messages of HTTP servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_MOST = 500


def detail(answer: httpx.Response) -> str:
    """Returns the message of an error response: FastAPI's `detail`, else the text."""
    try:
        found = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        found = answer.text
    if isinstance(found, list):  # of validation errors
        found = "; ".join(map(_field, found))
    return " ".join(str(found).split())[:_MOST]


def _field(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    where = ".".join(str(part) for part in error.get("loc", ()) if part != "body")
    return ": ".join(filter(None, [where, str(error.get("msg", ""))]))
