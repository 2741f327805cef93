"""Lightning's `Callback`, from whichever of its two packages the program uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback

    INSTALLED = True
else:

    def _find() -> type | None:
        """Returns the class of the package that the program has imported, else of the one that is
        installed.
        """
        names = ["lightning.pytorch", "pytorch_lightning"]
        for name in sorted(names, key=lambda name: name not in sys.modules):
            try:
                return __import__(name, fromlist=["Callback"]).Callback
            except ImportError:
                continue
        return None

    Callback = _find() or object
    INSTALLED = Callback is not object
