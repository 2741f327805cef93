"""Simulated nodes and stores for the pages on training, as the tests of `zeus` have them."""

from tests.zeus.batch_size.client.conftest import empty_database, kept
from tests.zeus.conftest import node, virtual_node, work

__all__ = ["empty_database", "kept", "node", "virtual_node", "work"]
