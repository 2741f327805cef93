"""Functions of ml-energy/zeus that nothing here uses."""

from __future__ import annotations

import logging
import os
import sys

URL = "http://ipinfo.io/json"


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
            f"where this machine is cannot be found out at {url} ({error}); give the latitude and "
            "the longitude yourself"
        ) from error
    return latitude, longitude


LEVEL_ENV = "ZEUS_LOG_LEVEL"


def get_logger(name: str, level: int = logging.INFO, propagate: bool = False) -> logging.Logger:
    """A logger that prints to standard output.

    A logger that exists is returned as it is.
    """
    known = name in logging.Logger.manager.loggerDict
    logger = logging.getLogger(name)
    if known:
        return logger
    logger.propagate = propagate
    logger.setLevel(os.environ.get(LEVEL_ENV, level))
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(name)s](%(filename)s:%(lineno)d) %(message)s")
    )
    logger.addHandler(handler)
    return logger
