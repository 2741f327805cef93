"""Reads `zeusd.toml` and reports invalid lines."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from zeus_common.text import explain
from zeus_ipc.controls import Control
from zeus_ipc.parsing import Malformed, parse_toml, read_file
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH
from zeus_ipc.wire import MegaHertz, matching
from zeusd.core.access import LOWERING, OPEN, Access, AllowRule, RootMay
from zeusd.core.policy import (
    CoreSettings,
    GpuRule,
    LeaseTerms,
    LedgerAccess,
    OutsideChange,
    RestorePower,
    SitePolicy,
)
from zeusd.devices.vendors import SYSFS, Options
from zeusd.identity import DEFAULT_STATE_DIR, DRIVER_MODULE
from zeusd.restore_rule import SETTLE_S
from zeusd.runtime.power_sources import HWMON
from zeusd.runtime.powercap import POWERCAP
from zeusd.server.fairness import Limits
from zeusd.server.listener import MAX_PATH

log = logging.getLogger(__name__)

DEFAULT_GROUP = "zeus"
"""Group whose members may lower controls that they lease if there is no `[[allow]]` rule."""


class ConfigError(Exception):
    """The configuration cannot be used: one sentence with file, line and remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


MAX_SOCKET = MAX_PATH - len(".devices")
"""Bytes of the socket's path: others are named after it."""


def _bindable(path: str) -> str:
    if not 0 < len(os.fsencode(path)) <= MAX_SOCKET:
        raise ValueError(f"write a path of 1 to {MAX_SOCKET} bytes")
    return path


class DaemonSection(_Section):
    """`[daemon]`: the socket and the files."""

    socket: Annotated[str, AfterValidator(_bindable)] = DEFAULT_SOCKET_PATH
    """Where clients connect, unless systemd passes a socket."""
    socket_mode: Annotated[
        str, matching("0?[0-7]{3}", 'write three octal digits, such as "0660"')
    ] = "0660"
    """Permission bits, octal, of the socket that zeusd creates unless systemd passes one. Users
    who may not write to it cannot connect."""
    socket_group: str | None = None
    """Group that owns the socket; unset: the daemon's own."""
    state_dir: Annotated[str, Field(min_length=1)] = DEFAULT_STATE_DIR
    """Directory of the journal. It must survive the daemon, but not a reboot."""
    stop_timeout_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    """How long a stop waits for restores."""


class ServerSection(_Section):
    """`[server]`: limits per user, and for all users together."""

    max_connections_per_user: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Concurrent connections of one user; more are refused."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 4096
    """Connections of all users together; fewer if the system allows fewer open files."""
    requests_per_second: Annotated[float, Field(gt=0, le=1e6)] = 2000.0
    """Requests per second of one user. Excess requests wait; nobody is disconnected for them.
    One that takes zeusd more than 0.1 ms of processor time counts as several."""


def _simulable(spec: str) -> str:
    from zeusd.devices.simulated.spec import parse_spec

    parse_spec(spec)
    return spec


class NvmlSection(_Section):
    """`[nvml]`: the source of GPUs."""

    library: str | None = None
    """Path of libnvidia-ml; unset: libnvidia-ml.so.1 as the system finds it."""
    simulate: Annotated[str, AfterValidator(_simulable)] | None = None
    """Simulate a node instead: `4xv100-pcie`, or `report:FILE` of `zeusctl probe`."""
    retry_s: Annotated[float, Field(ge=0.01, le=3600)] = 5.0
    """Pause between attempts to load a driver while there is none."""
    module: str = DRIVER_MODULE
    """The driver's directory in sysfs, which identifies a load of the driver."""


class AmdSection(_Section):
    """`[amd]`: where AMD's GPUs come from, on a node that has no NVIDIA GPU."""

    library: str | None = None
    """The libamd_smi to load, also where there are NVIDIA GPUs; unset: the one that is found."""
    sysfs: str = SYSFS
    """Where sysfs is mounted."""


class LeaseSection(_Section):
    """`[lease]`: how long a lease lasts without a heartbeat, in seconds."""

    ttl_s: Annotated[float, Field(ge=0.1, le=86_400)] = 15.0
    """TTL of leases whose holder requests no other."""
    ttl_min_s: Annotated[float, Field(ge=0.1, le=86_400)] = 2.0
    """Smallest TTL that a client may request."""
    ttl_max_s: Annotated[float, Field(ge=0.1, le=86_400)] = 120.0
    """The most."""
    busy_ttl_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """TTL of leases whose holder sends no heartbeat but uses the CPU, or waits for one, such as a
    process whose Python waits for C code. 0: the same as for one that sleeps."""


class RestoreSection(_Section):
    """`[restore]`: restore targets."""

    power_limit: RestorePower = "site-max"
    """site-max: the configured limit, else the limit in force when zeusd first saw the GPU in this
    boot. device-max: the highest that the GPU accepts. device-default: the vendor's default."""
    outside_change: OutsideChange = "keep"
    """keep: a value that someone else set during a lease stays. override: it is overwritten."""
    settle_s: Annotated[float, Field(ge=0, le=600)] = SETTLE_S
    """How long after a write the driver may still apply it. Where a write was not confirmed, a
    restore is confirmed after this time."""
    on_stop: Literal["restore", "keep"] = "restore"
    """What `systemctl stop` does with leases of running processes. A restart always keeps them."""


Watts = Annotated[float, Field(ge=0, le=100_000)]


def _ascending(value: tuple[Any, Any]) -> tuple[Any, Any]:
    if value[0] > value[1]:
        raise ValueError("the first number must not be above the second")
    return value


Clocks = Annotated[tuple[MegaHertz, MegaHertz], AfterValidator(_ascending)]


class GpuSection(_Section):
    """`[[gpu]]`: a rule for the GPUs that `match` names; the first that matches applies."""

    match: Annotated[str, Field(min_length=1)] = "*"
    """Shell pattern for the UUID or the product name."""
    power_limit_w: Annotated[float | None, Field(gt=0, le=100_000)] = None
    """The site limit, in watts: the value that a restore writes, and the highest anyone may set."""
    enforce: bool = False
    """Whether zeusd lowers a power limit above the site limit: at start, after a reload, after
    `zeusctl resume`, after a GPU returned, and when someone raised it outside zeusd. Clock ranges
    are written at all of these but the last."""
    gpu_clocks_mhz: Clocks | None = None
    """Range that a restore writes to the graphics clock; unset: unlocked."""
    memory_clocks_mhz: Clocks | None = None
    """The same for the memory clock."""

    @model_validator(mode="after")
    def _enforces_something(self) -> GpuSection:
        values = (self.power_limit_w, self.gpu_clocks_mhz, self.memory_clocks_mhz)
        if self.enforce and values == (None, None, None):
            raise ValueError(
                "enforce needs a power_limit_w, gpu_clocks_mhz or memory_clocks_mhz in the same "
                "[[gpu]] rule"
            )
        return self


class AccessSection(_Section):
    """`[access]`: administrators, and limits for everyone else."""

    admin_users: list[str | int] = []
    """Users who may change everything and revoke anyone's lease. Names or numbers."""
    admin_groups: list[str | int] = ["zeus-admin"]
    """Groups whose members may do the same."""
    root: RootMay = "host"
    """Whether uid 0 is an administrator: host: outside containers; always; never."""
    require_compute_process: bool = False
    """Whether a user must have a compute process on a GPU to change it."""
    writes_per_second: Annotated[float, Field(gt=0, le=1e6)] = 1000.0
    """Sets, acquires and releases per second of one user; twice as many in a burst."""
    leases_per_user: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Concurrent leases of one user's processes."""
    losses_per_user: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Leases that one user's processes may have lost and neither acquired nor released since.
    Beyond this, the user gets no new lease."""


def _index_or_pattern(value: Any) -> Any:
    return str(value) if type(value) is int and value >= 0 else value


GpuPattern = Annotated[str, BeforeValidator(_index_or_pattern)]


class AllowSection(_Section):
    """`[[allow]]`: lets users change controls of GPUs. Default: group zeus may lower them."""

    users: list[str | int] = []
    """Names or numbers; "*": everyone."""
    groups: list[str | int] = []
    """The same for groups; a rule applies to users named by either."""
    gpus: Annotated[list[GpuPattern], Field(min_length=1)] = ["*"]
    """Shell patterns for UUID or product name, or NVML indices: 0 and "0" are the same."""
    controls: Annotated[list[Control], Field(min_length=1)] = sorted(LOWERING)
    """Controls that they may change."""
    power_limit_w: Annotated[tuple[Watts, Watts], AfterValidator(_ascending)] | None = None
    """Smallest and largest limit, in watts; the site limit applies as well."""
    gpu_clocks_mhz: Clocks | None = None
    """Smallest and largest graphics clock."""
    memory_clocks_mhz: Clocks | None = None
    """Smallest and largest memory clock."""

    def rule(self) -> AllowRule:
        """Convert to the core's form. Unknown names match nobody."""
        return AllowRule(
            uids=_ids(self.users, _uid, "user"),
            gids=_ids(self.groups, _gid, "group"),
            everyone="*" in self.users,
            gpus=tuple(self.gpus),
            controls=frozenset(self.controls),
            ranges=_in_core_units(self),
            group_names=tuple(str(name) for name in self.groups),
        )


def _in_core_units(rule: AllowSection | GpuSection) -> dict[Control, Any]:
    """The values of a rule by control, in mW and MHz, as tuples."""
    limit_w = rule.power_limit_w
    limits_w = limit_w if limit_w is None or isinstance(limit_w, tuple) else (limit_w,)
    values = {
        Control.POWER_LIMIT: limits_w and tuple(round(one * 1000) for one in limits_w),
        Control.GPU_CLOCKS: rule.gpu_clocks_mhz,
        Control.MEMORY_CLOCKS: rule.memory_clocks_mhz,
    }
    return {control: value for control, value in values.items() if value is not None}


def _uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _gid(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _ids(names: Iterable[str | int], look_up: Callable[[str], int], kind: str) -> frozenset[int]:
    numbers = set()
    for name in names:
        if isinstance(name, int):
            numbers.add(name)
        elif name != "*":
            try:
                numbers.add(look_up(name))
            except KeyError:
                log.warning(
                    "there is no %s %s; rules for it match nobody",
                    kind,
                    name,
                    extra={"event": "unknown_name"},
                )
    return frozenset(numbers)


class EnergySection(_Section):
    """`[energy]`: what zeusd measures."""

    cpu: bool = True
    """Whether zeusd measures the energy of CPUs and their memory, if the kernel offers it. Anyone
    who may connect can read it, 20 times a second."""
    powercap: str = POWERCAP
    """The kernel's directory for it."""
    hwmon: str = HWMON
    """The kernel's directory for power meters: those of Grace CPUs, which have no powercap."""


class AccountingSection(_Section):
    """`[accounting]`: the energy ledger."""

    enabled: bool = True
    """Whether to keep a ledger, if it has a directory."""
    directory: str | None = None
    """Its directory; unset: systemd's StateDirectory (/var/lib/zeusd), and no ledger without one or
    on simulated GPUs."""
    processes: bool = False
    """Whether energy of a GPU that nobody holds is charged to its processes: they are listed once a
    second, which takes the driver some milliseconds per GPU."""
    ignored_units: list[str] = [
        *("nvidia-*.service", "dcgm*.service", "datadog-agent.service", "prometheus-*.service"),
        *("gdm.service", "lightdm.service", "sddm.service"),
    ]
    """Patterns of services that are charged only if no other process is on the GPU."""
    visibility: Literal["own", "all"] = "own"
    """own: users see their own energy, and the others' as one sum. all: everyone sees it all."""
    readers: list[str | int] = []
    """Groups whose members see everything, as administrators do. Names or numbers."""
    keep_rows_days: Annotated[int, Field(ge=2, le=36_500)] = 400
    """How long the ledger keeps energy by quarter of an hour, job and pod."""
    keep_days: Annotated[int, Field(ge=2, le=36_500)] = 760
    """How long the ledger keeps sums by user and day."""
    keep_processes_days: Annotated[int, Field(ge=0, le=36_500)] = 7
    """How long the ledger keeps energy by process of GPUs that nobody held. 0: not at all."""


class LogSection(_Section):
    """`[log]`: the log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of records to write."""
    format: Literal["auto", "json", "text", "journal"] = "auto"
    """auto: journal fields under systemd, text on a terminal, JSON lines elsewhere."""


class Config(_Section):
    """All of `zeusd.toml`."""

    daemon: DaemonSection = DaemonSection()
    server: ServerSection = ServerSection()
    nvml: NvmlSection = NvmlSection()
    amd: AmdSection = AmdSection()
    lease: LeaseSection = LeaseSection()
    restore: RestoreSection = RestoreSection()
    access: AccessSection = AccessSection()
    allow: list[AllowSection] = []
    gpu: list[GpuSection] = []
    energy: EnergySection = EnergySection()
    accounting: AccountingSection = AccountingSection()
    log: LogSection = LogSection()

    def settings(self) -> CoreSettings:
        """The core's part, with users and groups looked up."""
        return CoreSettings(
            site=self._site(), access=self._access(), terms=self._terms(), ledger=self._ledger()
        )

    def vendors(self) -> Options:
        """The vendors' options."""
        return Options(
            nvidia_library=self.nvml.library,
            nvidia_module=self.nvml.module,
            amd_library=self.amd.library,
            sysfs=self.amd.sysfs,
        )

    def fixed(self, section: str) -> object:
        """The settings of a section that only a restart changes."""
        others = {
            "accounting": {"visibility": "own", "readers": []},
            "daemon": {"stop_timeout_s": 0.0},
        }
        return getattr(self, section).model_copy(update=others.get(section))

    def ledger_directory(self) -> str | None:
        """Directory of the energy ledger; None: there is no ledger."""
        section = self.accounting
        if not section.enabled:
            return None
        if section.directory is not None or self.nvml.simulate is not None:
            return section.directory
        return os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or None

    def _ledger(self) -> LedgerAccess:
        section = self.accounting
        return LedgerAccess(
            everybody=section.visibility == "all",
            gids=_ids(section.readers, _gid, "group"),
        )

    def _terms(self) -> LeaseTerms:
        low, high = self.lease.ttl_min_s, self.lease.ttl_max_s
        return LeaseTerms(
            ttl_ns=round(self.lease.ttl_s * 1e9),
            ttl_min_ns=round(min(low, self.lease.ttl_s) * 1e9),
            ttl_max_ns=round(max(high, self.lease.ttl_s) * 1e9),
            busy_ttl_ns=round(self.lease.busy_ttl_s * 1e9),
        )

    def _access(self) -> Access:
        if self.nvml.simulate is not None and not self.model_fields_set & {"access", "allow"}:
            return replace(OPEN, admin_uids=frozenset({os.geteuid()}))
        section = self.access
        admins = set(_ids(section.admin_users, _uid, "user"))
        if os.geteuid() != 0:
            admins.add(os.geteuid())  # this process's own user, who controls it anyway
        default = AllowSection(groups=[DEFAULT_GROUP])
        return Access(
            rules=tuple(one.rule() for one in self.allow or [default]),
            admin_uids=frozenset(admins),
            admin_gids=_ids(self.admin_groups(), _gid, "group"),
            root=section.root,
            require_compute_process=section.require_compute_process,
            writes_per_second=section.writes_per_second,
            leases_per_user=section.leases_per_user,
            losses_per_user=section.losses_per_user,
        )

    def admin_groups(self) -> list[str | int]:
        """The groups of administrators; the default one only if it exists."""
        groups = self.access.admin_groups
        if "admin_groups" in self.access.model_fields_set:
            return groups
        return [name for name in groups if group_exists(name)]

    def _site(self) -> SitePolicy:
        return SitePolicy(
            restore_power=self.restore.power_limit,
            outside_change=self.restore.outside_change,
            settle_s=self.restore.settle_s,
            rules=tuple(
                GpuRule(rule.match, _in_core_units(rule), rule.enforce) for rule in self.gpu
            ),
        )

    def limits(self) -> Limits:
        """The server's limits per user."""
        return Limits(
            connections=self.server.max_connections_per_user,
            requests_per_second=self.server.requests_per_second,
        )


def group_exists(name: str | int) -> bool:
    """Whether this system has a group of this name."""
    try:
        grp.getgrnam(str(name))
    except KeyError:
        return False
    return True


def load(path: str) -> Config:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: It cannot be read, is not TOML, or has a setting that zeusd does not accept.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else error
        reason = getattr(error, "strerror", None) or reason
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    try:
        data = parse_toml(text)
    except Malformed as error:
        match = re.search(r"line (\d+)", str(error))
        line = f"{match.group(1)}" if match else "last"
        reason = re.sub(r"^it is not valid: | \(at (line|end).*\)$", "", str(error))
        raise ConfigError(f"{path}: line {line}: not valid TOML: {reason}") from None
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = [
            f"{path}: line {_line_of(text, fault['loc'])}: {_explain(fault)}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("\n".join(faults)) from None


def _explain(fault: Any) -> str:
    # Counted from 1, as in warnings.
    name = ".".join(str(one + 1 if isinstance(one, int) else one) for one in fault["loc"])
    name = re.sub(r"^(gpu|allow)\.([0-9]+)", r"[[\1]] \2:", name).replace(":.", ": ").rstrip(":")
    if fault["type"] == "extra_forbidden":
        return f"{name}: zeusd has no such setting; check the spelling"
    if name in Config.model_fields:
        section = f"[[{name}]]" if fault["type"] == "list_type" else f"[{name}]"
        return f"{name}: write it as {section}"
    return explain({**fault, "loc": (name,)})


def _parts(key: str) -> list[Any]:
    return [part.strip().strip("\"'") for part in key.split(".")]


def _line_of(text: str, loc: tuple[int | str, ...]) -> int:
    """The line of the setting at `loc`; tomllib does not keep positions."""
    wanted: list[Any] = list(loc)
    section: list[Any] = []
    counts: dict[str, int] = {}
    best = 1
    best_depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        key = re.match(r"\s*((?:\"[^\"]*\"|'[^']*'|[^#=\"'])+)=", line)
        if header:
            section = _parts(header.group(2))
            if header.group(1) == "[[":
                name = header.group(2).strip()
                section.append(counts.get(name, 0))
                counts[name] = counts.get(name, 0) + 1
            here = section
        elif key:
            here = section + _parts(key.group(1))
        else:
            continue
        depth = 0
        while depth < min(len(here), len(wanted)) and here[depth] == wanted[depth]:
            depth += 1
        if depth == len(here) and depth > best_depth:
            best, best_depth = number, depth
    return best
