"""Counts the bytes that a rank sends for training steps, and would send without codecs.

    counted        all of training_step, backward and the optimizer's step: gradients, in a warm-up
                   dense ones, parameters, buffers, flags of usage and overflow, norms, and what
                   the step itself logs over ranks
    not counted    set-up, validation, checkpoints, and the last round of a fit

Dense, gradients would be sent in the format that the strategy gives them, and all else as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel.compression import Tally


class StepBytes:
    """Counts the bytes that are sent inside `counting`.

    Args:
        sent: Returns all bytes that this rank has sent so far.
        codecs: Returns the bytes of these that codecs have sent, and would have sent dense.
    """

    def __init__(self, sent: Callable[[], int], codecs: Callable[[], Tally]) -> None:
        self._sent, self._codecs = sent, codecs
        self._is_counting = False
        self.tally = Tally()  # of all steps so far

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes that are sent inside; nested entries count once."""
        if self._is_counting:
            yield
            return
        self._is_counting, sent, codecs = True, self._sent(), self._codecs()
        try:
            yield
        finally:
            self._is_counting = False
            sent, now = self._sent() - sent, self._codecs()
            saved = (now.raw_bytes - codecs.raw_bytes) - (now.sent_bytes - codecs.sent_bytes)
            self.tally += Tally(raw_bytes=sent + saved, sent_bytes=sent)


def total_bytes(traffics: Iterator[Traffic]) -> int:
    """Return the sum of the counters' bytes, each counter counted once."""
    return sum({id(one): one.total_bytes for one in traffics}.values())
