"""Stands over a module whose parameters a run has left in shards, until another run takes it.

module(x), module.state_dict()      an error, which says what to do
module.load_state_dict(...)
copy.deepcopy, pickle, torch.save
name, shape, full_tensor()          as in a hook of the run
trainer.save_checkpoint             `opened` around what saves
the next run                        calls `wake`, which makes the module full first
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from lightning_shard.data_parallel.scripted import hookable
from lightning_shard.errors import ConfigError

_STANDS = "_lightning_shard_at_rest"  # set on such modules


class ShardsAtRest:
    """Refuses by name what would take a rank's shards for the parameters.

    Args:
        module: The module that is left in shards.
        rank: This rank, for error messages.
        wake: Makes the module full; each rank must call. Returns False if that cannot be any more.
    """

    def __init__(self, module: nn.Module, rank: int, wake: Callable[[], bool]) -> None:
        self.wake = wake
        self._module, self._rank = module, rank
        self._is_open = False
        self._parts = [
            part for part in hookable(module) if next(part.parameters(), None) is not None
        ]
        self._handles = [handle for part in self._parts for handle in self._hooks(part)]
        for part in self._parts:
            vars(part)[_STANDS] = self

    def _hooks(self, part: nn.Module) -> list[Any]:
        called, saved, loaded = (
            _Refusal(self, what)
            for what in (
                "{} is called",
                "the state_dict of {} is asked for",
                "{} loads a state_dict",
            )
        )
        return [
            part.register_forward_pre_hook(called, prepend=True),
            part.register_state_dict_pre_hook(saved),  # type: ignore[no-untyped-call]
            part.register_load_state_dict_pre_hook(loaded),  # type: ignore[no-untyped-call]
        ]

    def refuse(self, what: str, module: nn.Module) -> None:
        """Raise ConfigError unless this is `opened`.

        Args:
            what: What is done to the module, whose class is named at "{}".
            module: The module, or a part of it.
        """
        if not self._is_open:
            raise self.error(what.format(f"the {type(module).__name__}"))

    def error(self, what: str) -> ConfigError:
        """Return the error for what takes shards for the parameters."""
        return ConfigError(
            f"Rank {self._rank}: {what}, but the fit has left the parameters in shards, expected "
            f"full ones. Save with trainer.save_checkpoint and load the file, go on with "
            f"trainer.fit, validate, test or predict on all ranks, or set "
            f"full_parameters_after_fit=True."
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Refuse nothing inside."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def end(self) -> None:
        """Stand over the module no more."""
        while self._handles:
            self._handles.pop().remove()
        for part in self._parts:
            vars(part).pop(_STANDS, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.error(f"the {type(self._module).__name__}, or a part of it, is copied")

    def __reduce__(self) -> NoReturn:
        raise self.error(f"the {type(self._module).__name__}, or a part of it, is pickled")


class _Refusal:
    """A hook that refuses; copied or pickled with its module, it does so, too."""

    def __init__(self, rest: ShardsAtRest, what: str) -> None:
        self._rest, self._what = rest, what

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._rest.refuse(self._what, module)


def wake(module: nn.Module) -> None:
    """Make a module full that another strategy's run has left in shards; each rank must call.

    Raises:
        ConfigError: That strategy is gone.
    """
    stands: ShardsAtRest | None = vars(module).get(_STANDS)
    if stands is not None and not stands.wake():
        raise stands.error(
            f"the {type(module).__name__} is to run, whose strategy, which has its shards, is gone"
        )
