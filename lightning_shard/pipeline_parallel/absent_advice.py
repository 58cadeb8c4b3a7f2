"""Turns torch's errors about parameters without elements into errors with names and advice.

Between the steps of a pipeline a parameter of another stage has no elements here. User code that
computes with it and with a full tensor, like an average that is kept by hand, fails on its size.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_shard.errors import ConfigError, ShardError

_OF_NOTHING = re.compile(r"\(0\)|\[0\]|\bsize 0\b|numel\(\) == 0|no identity")


@contextmanager
def explaining_absent(names: Sequence[str]) -> Iterator[None]:
    """Say which parameters other ranks have when user code inside fails on an empty tensor.

    Args:
        names: Names of the parameters that other ranks of the pipeline have.

    Raises:
        ConfigError: User code failed on a tensor without elements; in place of torch's error.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ShardError) or not names or not _OF_NOTHING.search(str(error)):
            raise
        raise ConfigError(
            f"Between the steps of a pipeline each rank has the parameters of its own stages only: "
            f"{len(names)} of other stages, such as {names[0]!r}, have no elements here. A hook "
            f"met a tensor without elements ({error}), expected each rank to compute with what it "
            f"has. For an average of the weights use Lightning's EMAWeightAveraging or "
            f"WeightAveraging in place of a copy that is kept by hand, or use strategy='zero2'."
        ) from error
