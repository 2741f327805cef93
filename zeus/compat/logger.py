"""Loggers with a handler of their own, as ml-energy/zeus makes them."""

from __future__ import annotations

import logging
import os
import sys

LEVEL_ENV = "ZEUS_LOG_LEVEL"


def get_logger(name: str, level: int = logging.INFO, propagate: bool = False) -> logging.Logger:
    """A logger that prints to standard output.

    A logger that exists is returned as it is.

    Args:
        name: Its name.
        level: Its level, where `$ZEUS_LOG_LEVEL` is not set.
        propagate: Whether the root logger's handlers get its records, too.
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
