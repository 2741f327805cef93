"""One GPU, and the GPUs of this process. Units are NVML's: mW, mJ, MHz, degrees Celsius.

Methods raise the exceptions of `zeus.exceptions`. A setter acquires the lease on its control, which
lasts until `release` or the end of this process. The camelCase names of older code work, with a
DeprecationWarning each.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zeus import _node
from zeus.compat import old_names
from zeus.device.visible import VARIABLES, visible_gpus
from zeus.exceptions import (
    GPU_INDICES,
    ZeusGPUHeterogeneousError,
    ZeusGPUInvalidArgError,
    ZeusGPUNotSupportedError,
    from_ipc,
)
from zeus.utils.configured import OfProcess
from zeus.utils.warn import warn
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo

_aliases_used: set[str] = set()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ZeusIpcError as error:
        raise from_ipc(error) from error


class _CamelCase:
    """Resolves camelCase names of methods, as older code calls them."""

    def __getattr__(self, name: str) -> Any:
        snake = re.sub(r"(?<!^)([A-Z])", lambda match: f"_{match.group(1).lower()}", name)
        if name.startswith("_") or snake == name or not hasattr(type(self), snake):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in _aliases_used:
            _aliases_used.add(name)
            warn(f"{name} is now {snake}.", DeprecationWarning)
        return getattr(self, snake)


class GPU(OfProcess, _CamelCase):
    """One GPU of this node.

    Args:
        client: Its node.
        info: Its constant properties.
        seen: Number of its partitions that this process sees; None: all.

    Attributes:
        info: Its constant properties.
    """

    def __init__(self, client: Client, info: GpuInfo, seen: int | None = None) -> None:
        self._client = client
        self.info = info
        self._seen = seen

    @property
    def uuid(self) -> str:
        """NVML UUID."""
        return self.info.uuid

    def get_name(self) -> str:
        """Product name."""
        return self.info.name

    def check_whole(self) -> None:
        """Check that this process sees all of the GPU, whose settings hold for all its partitions.

        Raises:
            ZeusGPUNotSupportedError: It sees only some partitions.
        """
        partitions = len(self.info.runtime_indices)
        if self._seen is not None and self._seen < partitions:
            raise ZeusGPUNotSupportedError(
                f"{self.info.name} {self.uuid} has {partitions} partitions, of which this process "
                f"sees {self._seen}, and its power limit and clocks hold for all; make all of them "
                "visible to the job, or set them with zeusctl",
                3,
            )

    # --------------------------------------------------------------------------- power limits

    def get_power_management_limit_constraints(self) -> tuple[int, int]:
        """Smallest and largest limit, mW, that this process may set: at most the lowest bound."""
        low, high = self.info.power_limit_min_mw, self.info.power_limit_max_mw
        if low is None or high is None:
            raise ZeusGPUNotSupportedError(f"{self.info.name} has no power limit to set", 3)
        highest = self.info.power_limit_highest_mw
        return low, high if highest is None else min(high, highest)

    def get_power_management_limit(self) -> int:
        """The requested limit, mW."""
        return int(self._of_state("power_limit_mw", "a power limit"))

    def set_power_management_limit(self, power_limit_mw: int, block: bool = True) -> None:
        """Sets the power limit, mW."""
        self.check_whole()
        with _translated():
            self._client.set_power_limit(self.uuid, power_limit_mw, block=block)

    def reset_power_management_limit(self, block: bool = True) -> None:
        """Restores the power limit to the site limit; the lease stays."""
        self._reset("power_limit", block)

    # ----------------------------------------------------------------------- persistence mode

    def get_persistence_mode(self) -> bool:
        """Whether persistence mode is on."""
        return bool(self._of_state("persistence_mode", "persistence mode"))

    def set_persistence_mode(self, enabled: bool, block: bool = True) -> None:
        """Turns persistence mode on or off."""
        self.check_whole()
        with _translated():
            self._client.set_persistence_mode(self.uuid, enabled, block=block)

    # --------------------------------------------------------------------------------- clocks

    def get_supported_memory_clocks(self) -> list[int]:
        """Memory clocks, MHz, descending."""
        with _translated():
            return self._client.clocks(self.uuid).memory_mhz

    def get_supported_graphics_clocks(self, memory_clock_mhz: int | None = None) -> list[int]:
        """Graphics clocks, MHz, descending, at a memory clock; None: at the highest."""
        with _translated():
            clocks = self._client.clocks(self.uuid)
        memory = max(clocks.memory_mhz) if memory_clock_mhz is None else memory_clock_mhz
        graphics = clocks.gpu_mhz.get(str(memory))
        if graphics is None:
            raise ValueError(f"{memory} MHz is not a memory clock; there are {clocks.memory_mhz}")
        return graphics

    def set_gpu_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True
    ) -> None:
        """Locks the graphics clock to a range, MHz."""
        self.check_whole()
        with _translated():
            self._client.set_gpu_clocks(self.uuid, min_clock_mhz, max_clock_mhz, block=block)

    def reset_gpu_locked_clocks(self, block: bool = True) -> None:
        """Unlocks the graphics clock; the lease stays."""
        self._reset("gpu_clocks", block)

    def set_memory_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True
    ) -> None:
        """Locks the memory clock to a range, MHz."""
        self.check_whole()
        with _translated():
            self._client.set_memory_clocks(self.uuid, min_clock_mhz, max_clock_mhz, block=block)

    def reset_memory_locked_clocks(self, block: bool = True) -> None:
        """Unlocks the memory clock; the lease stays."""
        self._reset("memory_clocks", block)

    def reset_locked_clocks(self, block: bool = True) -> None:
        """Unlocks the clocks, of graphics and, where it can be locked, of memory."""
        self.reset_gpu_locked_clocks(block)
        if self.info.supports.memory_clocks:
            with contextlib.suppress(ZeusGPUNotSupportedError):
                self.reset_memory_locked_clocks(block)

    # ------------------------------------------------------------------------- power profiles

    def get_supported_power_profiles(self) -> list[str]:
        """Names of the workload power profiles that it offers, such as `max-q`; none before
        Blackwell.
        """
        return [profile.name for profile in self.info.power_profiles]

    def set_power_profiles(self, profiles: Sequence[int | str]) -> list[str]:
        """Requests workload power profiles in addition to others' requests; empty: clears this
        process's. A lease on the power limit or on clocks does not prevent this; which of them
        applies in a conflict is undocumented.

        Args:
            profiles: Names or numbers.

        Returns:
            Names of those that are not enforced, because others' requests have priority.

        Raises:
            ZeusGPUInvalidArgError: The GPU does not offer one of them.
        """
        self.check_whole()
        wanted = [self._profile(profile) for profile in profiles]
        with _translated():
            held = self._client.set(self.uuid, "power_profile", wanted, together=True)
        return _not_enforced(self.info, wanted, held[self.uuid])

    def _profile(self, profile: int | str) -> int:
        for offered in self.info.power_profiles:
            if profile in (offered.profile, offered.name):
                return offered.profile
        names = ", ".join(self.get_supported_power_profiles()) or "none"
        raise ZeusGPUInvalidArgError(
            f"{self.info.name} has no workload power profile {profile!r}; it offers {names}", 2
        )

    # -------------------------------------------------------------------------------- sensors

    def get_average_power_usage(self) -> int:
        """Mean power of the last second, mW."""
        return self._of_power("average_mw", "average power")

    def get_instant_power_usage(self) -> int:
        """Present power, mW."""
        return self._of_power("instant_mw", "instant power")

    def get_average_memory_power_usage(self) -> int:
        """Mean power of the memory over the last second, mW."""
        return self._of_power("memory_average_mw", "memory power")

    def supports_get_total_energy_consumption(self) -> bool:
        """Whether there is an energy counter."""
        return self.info.supports.energy_counter

    def get_total_energy_consumption(self) -> int:
        """Energy since the driver was loaded, mJ.

        Raises:
            ZeusGPUNotSupportedError: There is no counter, or it counts a whole superchip; then
                `ZeusMonitor` measures the GPU alone.
        """
        with _translated():
            reading = self._client.energy(self.uuid)[self.uuid]
        if reading.scope == "module":
            raise ZeusGPUNotSupportedError(
                f"{self.info.name} counts the energy of its whole superchip; measure windows with "
                "ZeusMonitor instead, which are of the GPU",
                3,
            )
        return reading.energy_mj

    def get_gpu_temperature(self) -> int:
        """Temperature, degrees Celsius."""
        return int(self._of_state("temperature_c", "a temperature sensor"))

    # -------------------------------------------------------------------------------- leases

    def release(self) -> None:
        """Restores what this process changed on this GPU and releases its leases."""
        with _translated():
            self._client.release(self.uuid)

    # ------------------------------------------------------------------------------ internals

    def _reset(self, control: str, block: bool) -> None:
        with _translated():
            self._client.reset(self.uuid, control, block=block)

    def _of_state(self, name: str, what: str) -> Any:
        with _translated():
            value = getattr(self._client.state(self.uuid)[self.uuid], name)
        return self._present(value, what)

    def _of_power(self, name: str, what: str) -> int:
        with _translated():
            value = getattr(self._client.power(self.uuid)[self.uuid], name)
        return int(self._present(value, what))

    def _present(self, value: Any, what: str) -> Any:
        if value is None:
            raise ZeusGPUNotSupportedError(f"{self.info.name} does not offer {what}", 3)
        return value


class GPUs(OfProcess, _CamelCase):
    """The GPUs of this process, by the framework's index.

    Each method of `GPU` is here too, with the index as its first argument.

    Attributes:
        unusable: The node's GPUs that zeusd cannot use: a sentence for each.
    """

    def __init__(
        self, client: Client, infos: Sequence[GpuInfo], unusable: Sequence[str] = ()
    ) -> None:
        self._client = client
        self.unusable = unusable
        seen = Counter(info.uuid for info in infos)
        self.gpus = [GPU(client, info, seen[info.uuid]) for info in infos]

    @property
    def _gpus(self) -> list[GPU]:  # the name in ml-energy/zeus
        return self.gpus

    def __len__(self) -> int:
        return len(self.gpus)

    def __getitem__(self, gpu_index: int) -> GPU:
        return self.gpus[gpu_index]

    def with_power_limit(self, gpu_indices: Sequence[int], alone: bool = True) -> list[int]:
        """Selects one GPU for each power limit that this process sets: dies of a card share it, and
        partitions of a package everything.

        Args:
            alone: Whether no other process trains with it. If one does, the process of the first
                die or partition sets the limit, and the others select none.
        """
        infos = self._infos
        uuids = [info.uuid for info in infos]

        def sets(index: int) -> bool:
            return _owner(infos[index]) == uuids[index] and uuids.index(uuids[index]) == index

        chosen: dict[str, int] = {}
        for index in sorted(gpu_indices, key=lambda one: not sets(one)):
            if alone or sets(index):
                chosen.setdefault(_owner(infos[index]), index)
        return sorted(chosen.values(), key=list(gpu_indices).index)

    def owners_of_limits(self, gpu_indices: Sequence[int]) -> list[GPU]:
        """The GPUs that have the power limits of these, which this process need not see."""
        with _translated():
            infos = {info.uuid: info for info in self._client.node().gpus}
        uuids = dict.fromkeys(_owner(self._infos[index]) for index in gpu_indices)
        return [GPU(self._client, infos[uuid]) for uuid in uuids]

    def covered(self, gpu_indices: Sequence[int]) -> list[str]:
        """Describes what readings of partitions cover: a sentence for each GPU that has some."""
        infos = self._infos
        groups: dict[str, list[int]] = {}
        for index in gpu_indices:
            if len(infos[index].runtime_indices) > 1:
                groups.setdefault(infos[index].uuid, []).append(index)
        sources = []
        for group in groups.values():
            info, several = infos[group[0]], "s" * (len(group) > 1)
            sources.append(
                f"GPU{several} {', '.join(map(str, group))}: {len(group)} of the "
                f"{len(info.runtime_indices)} partitions of one {info.name}. Power and energy are "
                "those of the whole package, with what its other partitions draw; windows count "
                f"its energy once, at GPU {group[0]}."
            )
        return sources

    @property
    def _infos(self) -> list[GpuInfo]:
        return [gpu.info for gpu in self.gpus]

    def _uuids(self, gpu_indices: Sequence[int]) -> list[str]:
        """Each once: partitions of one GPU share it."""
        return list(dict.fromkeys(self.gpus[index].uuid for index in gpu_indices))

    def set_power_management_limits(
        self, gpu_indices: Sequence[int], power_limit_mw: int, block: bool = True
    ) -> None:
        """Sets the power limit, mW, of several GPUs in one message."""
        if not gpu_indices:
            return
        for index in gpu_indices:
            self.gpus[index].check_whole()
        uuids = self._uuids(gpu_indices)
        with _translated():
            self._client.set_power_limit(uuids, power_limit_mw, block=block)

    def acquire(self, gpu_indices: Sequence[int], control: str) -> None:
        """Acquires the leases on a control of several GPUs, even after they were lost."""
        with _translated():
            self._client.acquire(self._uuids(gpu_indices), [control], together=True)

    def set_power_profiles_of(self, gpu_indices: Sequence[int], profiles: Sequence[int]) -> None:
        """Requests workload power profiles on several GPUs, see `GPU.set_power_profiles`.

        Raises:
            ZeusGPUInvalidArgError: One of them is not enforced.
        """
        for index in gpu_indices:
            lost = self.gpus[index].set_power_profiles(profiles)
            if lost:
                raise ZeusGPUInvalidArgError(
                    f"{lost[0]} is not in force on {self.gpus[index].info.name}: another profile "
                    "that is requested has priority (`zeusctl show` names it)",
                    2,
                )

    def bound_graphics_clocks(self, gpu_indices: Sequence[int], max_mhz: int | None) -> None:
        """Keeps the graphics clocks of several GPUs, of one model, at or below one, MHz; None:
        restores them.
        """
        if not gpu_indices:
            return
        for index in gpu_indices:
            self.gpus[index].check_whole()
        uuids = self._uuids(gpu_indices)
        lowest = min(self.gpus[gpu_indices[0]].get_supported_graphics_clocks())
        with _translated():
            if max_mhz is None:
                self._client.reset(uuids, "gpu_clocks")
            else:
                self._client.set(uuids, "gpu_clocks", [lowest, max_mhz], together=True)

    def release_power_profiles(self, gpu_indices: Sequence[int]) -> None:
        """Clears the power profiles that this process requested, and releases the leases."""
        with _translated():
            uuids = self._uuids(gpu_indices)
            self._client.release(uuids, ["power_profile"])

    def publish_profile(
        self, gpu_indices: Sequence[int], progress: Mapping[int, float], measuring: bool = False
    ) -> None:
        """Publishes this process's progress at each power limit, see `Client.publish_profile`."""
        with _translated():
            uuids = self._uuids(gpu_indices)
            self._client.publish_profile(uuids, progress, measuring=measuring)

    def bounded_by(self, gpu_indices: Sequence[int], ceiling: str) -> bool | None:
        """Whether a ceiling of this name keeps a GPU below its other bounds in zeusd. Updates this
        process's copy of the bounds. None: there is no such ceiling.
        """
        with _translated():
            infos = {gpu.uuid: gpu for gpu in self._client.node().gpus}
        bounded: list[bool] = []
        for index in gpu_indices:
            gpu = self.gpus[index]
            info = infos[gpu.uuid]
            if info.power_limit_highest_mw != gpu.info.power_limit_highest_mw:
                gpu.info = info
            bounds = [
                (ceiling.name, ceiling.value[0])
                for ceiling in info.ceilings
                if ceiling.control == "power_limit"
            ]
            others = (mw for name, mw in bounds if name != ceiling)
            most = min([info.power_limit_max_mw or 0, *others])
            bounded += [mw < most for name, mw in bounds if name == ceiling]
        return any(bounded) if bounded else None

    def release_all(self, gpu_indices: Sequence[int]) -> None:
        """Restores what this process changed on these GPUs and releases its leases."""
        if not gpu_indices:
            return
        with _translated():
            self._client.release(self._uuids(gpu_indices))


class EmptyGPUs(GPUs):
    """An empty set of GPUs: access to one raises the reason.

    Attributes:
        reason: Why there are none, as a sentence.
    """

    def __init__(self, reason: str) -> None:
        self.gpus = []
        self.unusable = ()
        self.reason = reason

    def __getitem__(self, gpu_index: int) -> GPU:
        raise ValueError(f"No GPUs available. {self.reason}")


def _by_index(name: str) -> Callable[..., Any]:
    method = getattr(GPU, name)

    def forward(self: GPUs, gpu_index: int, *args: Any, **kwargs: Any) -> Any:
        return method(self[gpu_index], *args, **kwargs)

    forward.__name__ = name
    forward.__doc__ = method.__doc__
    return forward


for _name in [name for name in vars(GPU) if not name.startswith("_") and name != "uuid"]:
    setattr(GPUs, _name, _by_index(_name))


def _owner(info: GpuInfo) -> str:
    """UUID of the GPU that reports this one's power limit."""
    return info.power_domain[0] if info.power_domain else info.uuid


def _not_enforced(info: GpuInfo, wanted: Sequence[int], requested: Sequence[int]) -> list[str]:
    """Names of the workload power profiles that are not enforced because of others."""
    offered = {profile.profile: profile for profile in info.power_profiles}
    rivals = [offered[one] for one in requested if one in offered]
    return [
        offered[one].name
        for one in wanted
        if any(
            rival.profile in offered[one].conflicts and rival.priority < offered[one].priority
            for rival in rivals
        )
    ]


_guard = threading.Lock()
_gpus: tuple[object, GPUs] | None = None


def get_gpus(ensure_homogeneous: bool = False) -> GPUs:
    """The GPUs that this process's framework sees.

    Args:
        ensure_homogeneous: Require that all are of one model. Checked at every call.

    Raises:
        ZeusGPUInitError: They cannot be reached, or not be identified.
        ZeusGPUHeterogeneousError: They are of several models; it is a ValueError, too.
    """
    global _gpus
    client = _node.get_client()
    key = (
        id(client),
        os.getpid(),
        *(os.environ.get(name) for name in VARIABLES),
    )
    with _guard:
        if _gpus is None or _gpus[0] != key or not len(_gpus[1]):
            _gpus = (key, _discover(client))
        gpus = _gpus[1]
    if ensure_homogeneous:
        models = sorted({gpu.info.name for gpu in gpus.gpus})
        if len(models) > 1:
            raise ZeusGPUHeterogeneousError(
                f"GPUs of several models are visible: {', '.join(models)}; choose those of one "
                "with CUDA_VISIBLE_DEVICES"
            )
    return gpus


def _discover(client: Client) -> GPUs:
    with _translated():
        node = client.node()
    infos = visible_gpus(node.gpus, os.environ, simulated=node.simulated is not None)
    GPU_INDICES.clear()
    GPU_INDICES.update((info.uuid, index) for index, info in reversed([*enumerate(infos)]))
    unusable = [problem.cause for problem in node.problems if problem.part == "gpu"]
    if infos:
        return GPUs(client, infos, unusable)
    if unusable and not node.gpus:
        return EmptyGPUs(f"{'; '.join(unusable)}.")
    if node.gpus:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return EmptyGPUs(f"CUDA_VISIBLE_DEVICES={listed!r} hides all GPUs of this node.")
    return EmptyGPUs("The node has none, or its driver is not loaded.")


__path__: list[str] = []  # makes Python look for zeus.device.gpu.common, which zeus.compat finds
__getattr__ = old_names(__name__)
