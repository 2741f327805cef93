"""Configuration keys: of zeusd.toml, and of the servers."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel

from zeus.optimizer.batch_size.server import settings as batch_size
from zeus.optimizer.pipeline_frequency.server import settings as pipeline
from zeusd.config import Config

from .markdown import code, heading, paragraphs, prose, table
from .sources import FieldFacts, fields, meanings

_ZEUSD = """# zeusd.toml

Every key of `/etc/zeusd/zeusd.toml`. An unset key has its default, so an empty file is complete.
`zeusd check-config FILE` says whether zeusd would take a file, and which line is wrong if not;
`systemctl reload zeusd` takes changes over, except under `[daemon]`, `[nvml]` and `[energy]`. How
the parts work together: [zeusd](../operate/zeusd.md); the file as it is installed:
[systemd/zeusd.toml](../../systemd/zeusd.toml).
"""

_SERVERS = """# Settings of the servers

How the batch size server and the pipeline frequency server are set up. Each setting is an
environment variable; the server does not start if one with the prefix is not a setting.
"""

_HEAD = ("key", "type", "default", "bounds", "meaning")


def sections() -> dict[str, type[BaseModel]]:
    """The sections of zeusd.toml by how they are written there."""
    found = {}
    for name, field in Config.model_fields.items():
        annotation: Any = field.annotation
        if typing.get_origin(annotation) is list:
            found[f"[[{name}]]"] = typing.get_args(annotation)[0]
        else:
            found[f"[{name}]"] = annotation
    return found


def zeusd_toml() -> str:
    """The page of zeusd.toml."""
    found = _ZEUSD
    for written, model in sections().items():
        found += heading(2, written.replace("[", "\\[").replace("]", "\\]"), written.strip("[]"))
        lead = (model.__doc__ or "").partition("]`: ")[2]
        found += paragraphs(lead[:1].upper() + lead[1:]) + "\n"
        found += table(_HEAD, [_row(code(one.name), one, model) for one in fields(model)])
    return found


SERVERS: dict[str, tuple[type[BaseModel], str, str]] = {
    "Batch size server": (
        batch_size.ServerSettings,
        batch_size.PREFIX,
        "`bso serve`: [its page](../train/batch_size_server.md).",
    ),
    "Pipeline frequency server": (
        pipeline.PlanServerSettings,
        pipeline.PREFIX,
        "`zeus.optimizer.pipeline_frequency.server.router:app`: "
        "[its page](../train/pipeline_frequency_server.md).",
    ),
}
"""Each server's settings, the prefix of their variables, and where it is described."""


def servers() -> str:
    """The page of the servers' settings."""
    found = _SERVERS
    for title, (model, prefix, lead) in SERVERS.items():
        found += heading(2, title) + lead + "\n\n"
        rows = [_row(code(prefix + one.name.upper()), one, model) for one in fields(model)]
        found += table(("variable", *_HEAD[1:]), rows)
    return found


def _row(name: str, field: FieldFacts, model: type[BaseModel]) -> tuple[str, ...]:
    default = "unset" if field.default in (None, "null", '""') else code(field.default)
    kind = field.kind.removesuffix(" or null")
    return name, kind, default, field.bounds, prose(meanings(model)[field.name])
