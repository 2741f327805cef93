"""The device port and its backends. Only a vendor's own package depends on the vendor."""
