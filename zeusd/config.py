"""`zeusd.toml`: what it may hold, and which line is wrong when it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeus_ipc.paths import DEFAULT_SOCKET_PATH
from zeusd.core.policy import GpuRule, RestorePower, SitePolicy
from zeusd.ring.front import FrontOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_STATE_DIR = "/run/zeusd/state"


class ConfigError(Exception):
    """The configuration cannot be used: one sentence with file, line and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DaemonSection(_Section):
    """`[daemon]`: the socket and the files."""

    socket: str = DEFAULT_SOCKET_PATH
    socket_mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0660"
    """Permission bits, octal. Who may not write the socket cannot connect."""
    socket_group: str | None = None
    """Group that owns the socket; unset: the daemon's own."""
    state_dir: str = DEFAULT_STATE_DIR
    """Where the journal lives. It must outlive the daemon, but not the boot."""
    stop_timeout_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    """How long a stop waits for limits to be put back."""


class FrontSection(_Section):
    """`[front]`: the process that owns the ZeroMQ socket."""

    user: str | None = None
    """User it runs as when zeusd is root; unset: zeusd-front, else nobody."""
    max_connections_per_user: Annotated[int, Field(ge=1, le=100_000)] = 256
    memory_mib: Annotated[int, Field(ge=128, le=65536)] = 512
    max_files: Annotated[int | None, Field(ge=32)] = None


class NvmlSection(_Section):
    """`[nvml]`: where GPUs come from."""

    library: str | None = None
    """The libnvidia-ml to load; unset: libnvidia-ml.so.1 as the system finds it."""
    simulate: str | None = None
    """A simulated node instead, such as `4xv100-pcie`."""
    retry_s: Annotated[float, Field(ge=0.01, le=3600)] = 5.0
    """Pause between looks for a driver while there is none."""


class RestoreSection(_Section):
    """`[restore]`: what goes back to what."""

    power_limit: RestorePower = "site-max"
    """site-max: the configured limit, else what was in force when zeusd first saw the GPU in this
    boot. device-max: the most the GPU takes. device-default: the vendor's default."""


class GpuSection(_Section):
    """`[[gpu]]`: a rule for the GPUs that `match` names; the first that applies counts."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """Shell pattern for the UUID or the product name."""
    power_limit_w: Annotated[float | None, Field(gt=0, le=100_000)] = None
    """The site's maximum, in watts."""
    gpu_clocks_mhz: tuple[int, int] | None = None
    """Range that the graphics clock goes back to; unset: unlocked."""
    memory_clocks_mhz: tuple[int, int] | None = None


class LogSection(_Section):
    """`[log]`: what is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, JSON lines elsewhere."""


class Config(_Section):
    """All of `zeusd.toml`."""

    daemon: DaemonSection = DaemonSection()
    front: FrontSection = FrontSection()
    nvml: NvmlSection = NvmlSection()
    restore: RestoreSection = RestoreSection()
    gpu: list[GpuSection] = []
    log: LogSection = LogSection()

    def policy(self) -> SitePolicy:
        """The part the core needs."""
        return SitePolicy(
            restore_power=self.restore.power_limit,
            rules=tuple(
                GpuRule(
                    match=rule.match,
                    power_limit_mw=None
                    if rule.power_limit_w is None
                    else round(rule.power_limit_w * 1000),
                    gpu_clocks_mhz=rule.gpu_clocks_mhz,
                    memory_clocks_mhz=rule.memory_clocks_mhz,
                )
                for rule in self.gpu
            ),
        )

    def front_options(self, seed: int | None = None) -> FrontOptions:
        """How the front is run."""
        return FrontOptions(
            user=self.front.user,
            max_connections_per_user=self.front.max_connections_per_user,
            memory_mib=self.front.memory_mib,
            max_files=self.front.max_files,
            seed=seed,
            log_level=self.log.level,
            log_format=self.log.format,
        )


def load(path: str) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: It cannot be read, is not TOML, or holds something that zeusd does not take.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"line (\d+)", str(error))
        line = f"{match.group(1)}" if match else "last"
        reason = re.sub(r" \(at (line|end).*\)$", "", str(error))
        raise ConfigError(f"{path}: line {line}: not valid TOML: {reason}") from None
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = [
            f"{path}: line {_line_of(text, fault['loc'])}: {_name(fault['loc'])}: "
            f"{_explain(fault['type'], fault['msg'])}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("\n".join(faults)) from None


def _explain(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "zeusd knows no such setting; check the spelling"
    return message[:1].lower() + message[1:]


def _name(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _line_of(text: str, loc: tuple[int | str, ...]) -> int:
    """The line on which the setting at `loc` stands: tomllib does not keep positions."""
    wanted: list[Any] = list(loc)
    section: list[Any] = []
    counts: dict[str, int] = {}
    best = 1
    best_depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        key = re.match(r"\s*(\"[^\"]*\"|'[^']*'|[\w.-]+)\s*=", line)
        if header:
            section = [part.strip().strip("\"'") for part in header.group(2).split(".")]
            if header.group(1) == "[[":
                name = header.group(2).strip()
                section.append(counts.get(name, 0))
                counts[name] = counts.get(name, 0) + 1
            here = section
        elif key:
            here = section + [part.strip("\"'") for part in key.group(1).split(".")]
        else:
            continue
        depth = 0
        while depth < min(len(here), len(wanted)) and here[depth] == wanted[depth]:
            depth += 1
        if depth == len(here) and depth > best_depth:
            best, best_depth = number, depth
    return best
