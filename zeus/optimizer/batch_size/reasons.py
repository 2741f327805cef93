"""Classifies why a run ended."""

from __future__ import annotations

from collections.abc import Iterator

from zeus.optimizer.batch_size.common import Reason

# Names, not classes: a module that is not imported cannot have raised it.
_OUT_OF_MEMORY = frozenset(
    {"OutOfMemoryError", "ResourceExhaustedError"}
)  # torch, CuPy; TensorFlow
_SAYS_SO = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "resource_exhausted: out of memory",  # JAX
)
_INTERRUPTED = (KeyboardInterrupt, GeneratorExit)


def reason_of(error: BaseException | None) -> Reason:
    """Classifies a run's end.

    Args:
        error: Its exception; None: a normal end.
    """
    if error is None or isinstance(error, _INTERRUPTED):
        return "cancelled"
    if isinstance(error, SystemExit):
        return "failed" if error.code else "cancelled"
    return "oom" if any(map(_out_of_memory, _chain(error))) else "failed"


def _out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _OUT_OF_MEMORY) or any(words in text for words in _SAYS_SO)


def says_out_of_memory(text: str) -> bool:
    """Whether the end of a script's log says that it ran out of GPU memory."""
    lower = text.lower()
    return any(words in lower for words in (*_SAYS_SO, *(name.lower() for name in _OUT_OF_MEMORY)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
