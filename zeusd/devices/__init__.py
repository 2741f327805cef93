"""The device port and its backends. Outside its own package nothing asks for the vendor."""
