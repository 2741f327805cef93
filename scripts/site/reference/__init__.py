"""The reference part of the documentation's site, made from the code when the site is built.

Each page is a string of Markdown that a pure function generates from the code's objects: commands,
models, error codes, metrics. The pages are not stored in the repository, so they cannot be out of
date; `tests/docs` compares them with the programs' own output.
"""

from __future__ import annotations

from . import (
    api,
    commands,
    configuration,
    environment,
    errors,
    metrics,
    protocol,
    reports,
)
from .markdown import heading, table

INDEX = "reference/index.md"

_LEAD = """# Reference

Generated from the code when this site is built.

"""


def pages() -> dict[str, str]:
    """All pages of the reference: Markdown by path within the documentation."""
    found = {
        **api.pages(),
        **commands.pages(),
        "reference/exit_codes.md": errors.exit_codes(),
        "reference/environment.md": environment.page(),
        "reference/configuration.md": configuration.zeusd_toml(),
        "reference/servers.md": configuration.servers(),
        "reference/errors.md": errors.error_codes(),
        "reference/metrics.md": metrics.page(),
        "reference/protocol.md": protocol.page(),
        "reference/json.md": reports.page(),
    }
    return {INDEX: _index(found), **found}


def _index(found: dict[str, str]) -> str:
    text = _LEAD
    for title, prefix in (("Commands", "commands/"), ("Formats and codes", ""), ("Python", "api/")):
        rows = [
            (f"[{_title(page)}]({path.removeprefix('reference/')})", _first_sentence(page))
            for path, page in found.items()
            if path.removeprefix("reference/").rpartition("/")[0] == prefix.rstrip("/")
        ]
        text += heading(2, title) + table(("page", "what it has"), rows)
    return text


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").partition(" {")[0]


def _first_sentence(text: str) -> str:
    paragraph = text.split("\n\n")[1].replace("\n", " ")
    return paragraph.partition(". ")[0].rstrip(".:") + "."
