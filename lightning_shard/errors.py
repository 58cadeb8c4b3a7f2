"""The errors that users meet: each says the rank, what it got and expected, and what to do."""


class ShardError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ShardError, ValueError):
    """An option, a model or a combination of them that cannot work; raised before training."""


class LayoutError(ShardError, ValueError):
    """A shape, range or divisibility that a flat layout cannot hold."""


class BackendUnavailableError(ShardError):
    """A communication backend that cannot run here; the message names what to install."""


class CollectiveMismatchError(ShardError):
    """Ranks of one group met at the same point with different operations, shapes or dtypes."""


class DeadlockError(ShardError):
    """No rank can run and not every rank has finished; lists where each rank waits."""


class RankFailedError(ShardError):
    """A peer raised, died or fell silent; names the rank and the operation that noticed."""


class EvictedError(ShardError):
    """An elastic job goes on without this rank; says how often it failed, and its last error."""


class JobOverError(ShardError):
    """An elastic job has ended, or was left, while this rank still waited to take part in it."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint that does not fit this run, is damaged or cannot be written."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint that is not there."""


def some_of(names: list[str], most: int = 3) -> str:
    """Return the first of some names for a message, and how many more there are."""
    told = ", ".join(map(repr, names[:most]))
    return f"{told} and {len(names) - most} more" if len(names) > most else told
