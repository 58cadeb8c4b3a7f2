"""What an out-of-memory error is told beside its own text: what this rank held, and what saves.

    torch.OutOfMemoryError                                     of a device
    RuntimeError: ... DefaultCPUAllocator: can't allocate ...  of a host

The error stays the one that was raised, so that Lightning's batch size finder goes on catching it;
a note is added, which Python prints below it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_OF_HOSTS = ("DefaultCPUAllocator", "not enough memory")  # in torch's own words
_BEGINNING = "Out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that torch could not allocate memory, on a device or a host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(words in text for words in _OF_HOSTS) or ("CUDA" in text and "out of memory" in text)
    )


@contextmanager
def told_of_memory(place: str, describe: Callable[[], str]) -> Iterator[None]:
    """Add a note to out-of-memory errors that are raised inside; nested contexts add one.

    Args:
        place: What runs, such as "backward".
        describe: Says what this rank holds and what would save memory.
    """
    try:
        yield
    except RuntimeError as error:
        notes = getattr(error, "__notes__", ())
        if is_out_of_memory(error) and not any(note.startswith(_BEGINNING) for note in notes):
            error.add_note(f"{_BEGINNING} in {place}. {describe()}")
        raise
