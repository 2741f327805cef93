"""Fixtures of tests of devices."""

from tests.fake_nvml import fixtures

open_nvml = fixtures.open_nvml
