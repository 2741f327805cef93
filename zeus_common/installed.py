"""Whether the import package `zeus` is this project's alone."""

from __future__ import annotations

import os

_THEIRS = (("utils", "pydantic_v1.py"), ("util", "pydantic_v1.py"))
"""Files that ml-energy/zeus 0.8 to 0.16 has, and this project does not."""

_OURS = "compat.install()"
"""Text that only this project's `zeus/__init__.py` contains."""


def overlap(package: str) -> str | None:
    """Checks whether ml-energy/zeus is installed in the same folder, and which of the two is
    imported.

    Args:
        package: The folder of `zeus`.

    Returns:
        A sentence that says what to do; None if it is not.
    """
    if not any(os.path.exists(os.path.join(package, *one)) for one in _THEIRS):
        return None
    try:
        with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
            wins = "zeusd's" if _OURS in file.read() else "ml-energy/zeus's"
    except OSError:
        wins = "no"
    return (
        f"ml-energy/zeus and zeusd are both installed in {package}: `import zeus` gets {wins} "
        "package, with modules of both; keep one: pip uninstall -y zeus zeus-ml && pip install "
        "--force-reinstall zeusd"
    )
