"""This machine's location, from its address on the Internet."""

from __future__ import annotations

URL = "http://ipinfo.io/json"


def get_ip_lat_long(url: str = URL, timeout_s: float = 5.0) -> tuple[float, float]:
    """Latitude and longitude, degrees, from a public service that sees this machine's address.

    Args:
        url: The service.
        timeout_s: Time to wait for it.

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
