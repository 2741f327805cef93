"""Units, in those that the code counts in."""

MS = 1_000_000
"""A millisecond, ns."""

SECOND_NS = 1_000_000_000

HOUR_S, DAY_S = 3600, 24 * 3600

KWH_J = HOUR_S * 1000
"""A kilowatt-hour, J."""

WATT_MW = 1000
"""A watt, mW. Drivers round power limits to whole watts: closer ones are the same."""
