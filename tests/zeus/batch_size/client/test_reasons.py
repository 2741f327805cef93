"""How a run ended, from what ended it."""

from __future__ import annotations

import pytest

from zeus.optimizer.batch_size.endings import reason_of

# Classes of other libraries, by their names.
TorchOutOfMemory = type("OutOfMemoryError", (RuntimeError,), {})
Xla = type("XlaRuntimeError", (RuntimeError,), {})


def caused(outer: BaseException, inner: BaseException, *, hidden: bool = False) -> BaseException:
    """An error that was raised while another was handled, perhaps `from None`."""
    outer.__context__ = inner
    outer.__suppress_context__ = hidden
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (SystemExit(), "cancelled"),
        (SystemExit(0), "cancelled"),
        (SystemExit(1), "failed"),
        (SystemExit("no data"), "failed"),
        (ValueError("no data"), "failed"),
        (MemoryError(), "failed"),  # the host's: says nothing about the GPU's
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "failed"),
        (TorchOutOfMemory("Tried to allocate 20.00 MiB"), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), "oom"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "oom"),
        (Xla("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."), "oom"),
        (caused(ValueError("trainer failed"), TorchOutOfMemory()), "oom"),
        (caused(ValueError("trainer failed"), TorchOutOfMemory(), hidden=True), "failed"),
        (caused(KeyboardInterrupt(), TorchOutOfMemory()), "cancelled"),
    ],
    ids=repr,
)
def test_reasons(error: BaseException | None, reason: str) -> None:
    assert reason_of(error) == reason


def test_circular_error_chains() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert reason_of(first) == "failed"
