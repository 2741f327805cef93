"""Why a run ended, from what ended it."""

from __future__ import annotations

from collections.abc import Iterator

from zeus.optimizer.batch_size.common import Reason

# Names and not classes: what is not imported cannot have raised it.
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
_BY_SOMEBODY = (KeyboardInterrupt, GeneratorExit)


def reason_of(error: BaseException | None) -> Reason:
    """What a run's end means for its batch size.

    Args:
        error: What ended it; None where it just ended.
    """
    if error is None or isinstance(error, _BY_SOMEBODY):
        return "cancelled"
    if isinstance(error, SystemExit):
        return "failed" if error.code else "cancelled"
    return "oom" if any(map(_out_of_memory, _chain(error))) else "failed"


def _out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _OUT_OF_MEMORY) or any(words in text for words in _SAYS_SO)


def says_out_of_memory(text: str) -> bool:
    """Whether the end of a script's log says that GPU memory did not suffice."""
    lower = text.lower()
    return any(words in lower for words in (*_SAYS_SO, *(name.lower() for name in _OUT_OF_MEMORY)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
