"""A callback that ranks of one process share is left as it was, in whatever order they end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard.strategies.trainer.hook_advice import hooks_inside


class Looks(pl.Callback):
    def on_fit_end(self, trainer: object, pl_module: object) -> None:
        del trainer, pl_module


def _enter(stack: ExitStack, rank: int, entered: list[int], shared: Looks) -> None:
    @contextmanager
    def around() -> Iterator[None]:
        entered.append(rank)
        yield

    stack.enter_context(hooks_inside(around, BoringModel(), [shared]))


@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_callback_keeps_no_context_of_a_rank_that_has_ended(first: int) -> None:
    """A shared callback kept the context of a rank that had ended."""
    shared, entered = Looks(), list[int]()
    stacks = [ExitStack(), ExitStack()]
    _enter(stacks[0], 0, entered, shared)
    other = Thread(target=_enter, args=(stacks[1], 1, entered, shared))
    other.start()
    other.join()
    shared.on_fit_end(None, None)
    assert entered == [0]  # not the other rank's
    stacks[first].close()
    shared.on_fit_end(None, None)
    assert entered == ([0] if first == 0 else [0, 0])
    stacks[1 - first].close()
    assert "on_fit_end" not in vars(shared)
