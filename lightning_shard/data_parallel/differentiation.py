"""What a step of the user's differentiates by itself, and not by the backward of the Trainer.

On one device a weight has one tensor and one gradient. Where ranks share layers or sequences, a
step sees a tensor that stands for a weight, or gets a summand of its gradient, which nothing but
the entrance of autograd can tell: it asks the innermost `Differentiator` of this thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.torch_private import exchange_engine_entrance, is_traced

Gradients = Sequence[Any]
Run = Callable[[Sequence[Any]], Gradients]


class Differentiator(Protocol):
    """Knows what gradients are, where ranks share a model."""

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of some inputs."""


class _OfThread(threading.local):
    """The differentiators of a thread, the innermost last; a rank of this process has a thread."""

    def __init__(self) -> None:
        self.stack: list[Differentiator] = []


_of_thread = _OfThread()
_lock = threading.Lock()
_num_asking = 0


@contextmanager
def asking(differentiator: Differentiator) -> Iterator[None]:
    """Inside, ask for each gradient that is taken by inputs; inner ones are asked first."""
    _count(1)
    _of_thread.stack.append(differentiator)
    try:
        yield
    finally:
        _of_thread.stack.pop()
        _count(-1)


def asking_nobody() -> AbstractContextManager[None]:
    """Inside, take gradients as this rank has them: those of a trial, for example."""
    return setting(_of_thread, stack=[])


def _count(more: int) -> None:
    """Stand at the entrance of autograd's engine while anybody is to be asked."""
    global _num_asking
    with _lock:
        before, _num_asking = _num_asking, _num_asking + more
        if not before or not _num_asking:
            exchange_engine_entrance(_enter if _num_asking else None)


def _enter(engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    grads, retain_graph, create_graph, inputs, *others = args
    stack = _of_thread.stack
    if not stack or not inputs or is_traced():  # compiled code's own graph is of one rank
        return engine(outputs, *args, **kwargs)

    who = asker.get()

    def run(given: Sequence[Any], depth: int) -> Gradients:
        if depth:
            below = depth - 1
            return stack[below].differentiate(
                given, lambda inner: run(inner, below), accumulates=kwargs["accumulate_grad"]
            )
        with having(asker, who):
            found: Gradients = engine(
                outputs, grads, retain_graph, create_graph, tuple(given), *others, **kwargs
            )
        return found

    with having(asker, Asker.ENGINE):
        return run(inputs, len(stack))
