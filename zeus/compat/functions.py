"""Functions of ml-energy/zeus that nothing here uses: environment, loggers, places."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

URL = "http://ipinfo.io/json"

LEVEL_ENV = "ZEUS_LOG_LEVEL"


def get_env(name: str, valtype: Callable[[str], T], default: T | None = None) -> T:
    """Reads an environment variable.

    Raises:
        ValueError: The variable is not set and there is no default, or its text is not a valid
            value.
    """
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"The environment variable {name} is not set; set it")
        return default
    convert: Callable[[str], T] = _boolean if valtype is bool else valtype  # type: ignore[assignment]  # T is bool
    try:
        return convert(text)
    except (KeyError, ValueError):
        kind = "true or false"
        if valtype is not bool:
            kind = f"of type {getattr(valtype, '__name__', valtype)}"
        raise ValueError(f"The environment variable {name} must be {kind}, not {text!r}") from None


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def resolve_gpu_indices(requested_gpu_indices: list[int] | None) -> tuple[list[int], list[int]]:
    """GPU indices as CUDA counts them, and the same GPUs' indices as NVML counts them.

    Raises:
        ValueError: The list is empty, or one of them names no GPU.
        ZeusGPUInitError: The GPUs cannot be reached.
    """
    from zeus import _node
    from zeus.device import get_gpus
    from zeus.monitor.devices import check_indices

    if requested_gpu_indices is not None and not requested_gpu_indices:
        raise ValueError("requested_gpu_indices must be None, or name a GPU")
    gpus = get_gpus()
    indices = check_indices(requested_gpu_indices, gpus)
    order = [gpu.uuid for gpu in _node.get_client().node().gpus]
    return indices, [order.index(gpus[index].uuid) for index in indices]


def get_logger(name: str, level: int = logging.INFO, propagate: bool = False) -> logging.Logger:
    """A logger that prints to standard output; one that exists is returned as it is."""
    known = name in logging.Logger.manager.loggerDict
    logger = logging.getLogger(name)
    if not known:
        logger.propagate = propagate
        logger.setLevel(os.environ.get(LEVEL_ENV, level))
        handler = logging.StreamHandler(sys.stdout)
        form = "[%(asctime)s] [%(name)s](%(filename)s:%(lineno)d) %(message)s"
        handler.setFormatter(logging.Formatter(form))
        logger.addHandler(handler)
    return logger


def get_ip_lat_long(url: str = URL, timeout_s: float = 5.0) -> tuple[float, float]:
    """Latitude and longitude, degrees, from a public service that sees this machine's address.

    Raises:
        ConnectionError: The service does not answer, or does not know.
    """
    import httpx

    try:
        answer = httpx.get(url, timeout=timeout_s).raise_for_status().json()
        latitude, longitude = map(float, answer["loc"].split(","))
    except (httpx.HTTPError, KeyError, ValueError, AttributeError) as error:
        raise ConnectionError(
            f"cannot find this machine's location at {url} ({error}); pass latitude and longitude"
        ) from error
    return latitude, longitude
