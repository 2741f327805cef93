"""Tests of the energy ledger."""
