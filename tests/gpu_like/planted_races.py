"""Fits with races that were put there, to see that they are found.

`python -m tests.gpu_like.planted_races [NAME ...]` prints what is seen of each fit, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import STREAMS
from lightning_shard.data_parallel.gradients import usage
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.offload.copier import HostCopier
from lightning_shard.data_parallel.units.unit import HERE, Unit
from tests.gpu_like.apart import fit_apart
from tests.gpu_like.device import NAME
from tests.gpu_like.fits import prepare
from tests.gpu_like.marks import WatchedStreams
from tests.gpu_like.ranks import Waited

Plant = Callable[[], Any]
_WAIT = Pending.wait
_LEFT: list[Any] = []  # handles that nobody waits for


def unwaited(operation: str) -> Plant:
    """Return what has nobody wait for the handles of an operation on the device."""

    def wait(pending: Any) -> None:
        is_it = not pending.done and pending._place.operation == operation
        if is_it and any(isinstance(work, Waited) for work in pending._transfer.works):
            _LEFT.append(pending._transfer)
            pending._transfer = pending._transfer._replace(works=())
        _WAIT(pending)

    return instead(Pending, "wait", wait)


def after(owner: type, method: str, then: Callable[..., Any]) -> Plant:
    """Return what does something after a method, which gets the method's arguments."""
    function = getattr(owner, method)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        with torch.no_grad():
            then(*args)
        return result

    return instead(owner, method, called)


def instead(owner: Any, name: str, function: Callable[..., Any]) -> Plant:
    """Return what puts a function in the place of another."""
    return lambda: patch.object(owner, name, function)


def _finishes_first(pending: Any) -> None:
    """Finish a transfer before its data has come."""
    if not pending.done and pending._transfer.finish is not None:
        pending._transfer.finish()
        pending._transfer = pending._transfer._replace(finish=None)
    _WAIT(pending)


def _frees_what_comes(unit: Unit) -> None:
    for flat in unit.flats if unit.state not in HERE else ():
        storage = flat.full.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(num_bytes)


def _zeroes(gradients: FlatGradients) -> None:
    if gradients.buffer._sent is not None:
        gradients.buffer._sent[0].zero_()


@contextmanager
def _after_nothing(copier: HostCopier) -> Iterator[None]:
    """Copy beside the current stream, in no order with it."""
    assert copier._streams is not None
    with copier._streams.use(copier._stream):
        yield


def _overwritten(message: Tensor, device: torch.device) -> Tensor:
    pinned = message.pin_memory()
    sent = pinned.to(device, non_blocking=True)
    pinned.zero_()
    return sent


def _reads_beside(gradients: FlatGradients) -> None:
    streams, device = STREAMS[NAME], gradients.flat.full.device
    with streams.use(streams.make(device)):
        gradients.flat.full.sum()


def _reads_from_beside(gradients: FlatGradients) -> None:
    streams, number = STREAMS[NAME], gradients.flat.full.new_zeros(8)
    mark = streams.mark(streams.current(number.device))
    with streams.use(streams.make(number.device)):
        streams.follow(mark)
        number.add_(1)
    number.sum()


def _drops_what_is_read(gradients: FlatGradients) -> None:
    streams, number = STREAMS[NAME], gradients.flat.full.new_zeros(8)
    mark = streams.mark(streams.current(number.device))
    with streams.use(streams.make(number.device)):
        streams.follow(mark)
        number.sum()


RACES: dict[str, tuple[str, Plant]] = {
    "gathered parameters are used at once": ("zero3", unwaited("all_gather")),
    "published parameters are used at once": ("zero1", unwaited("all_gather")),
    "reduced shards are used at once": ("zero2", unwaited("reduce_scatter")),
    "averages are used at once": ("shard_ddp", unwaited("all_reduce")),
    "received activations are used at once": ("pipeline_parallel", unwaited("recv")),
    "sums of layers are used at once": ("tensor_parallel", unwaited("all_reduce")),
    "other ranks' heads are used at once": ("context_parallel", unwaited("all_to_all")),
    "shards of all dimensions are used at once": ("hybrid_parallel", unwaited("reduce_scatter")),
    "averaged parameters are used at once": ("local_sgd", unwaited("all_reduce")),
    "chosen elements are used at once": ("shard_ddp_topk", unwaited("all_to_all")),
    "matrices of low rank are used at once": ("shard_ddp_powersgd", unwaited("all_reduce")),
    "signs are used at once": ("shard_ddp_onebit", unwaited("all_gather")),
    "bytes are used at once": ("shard_ddp_int8", unwaited("all_to_all")),
    "a sum is divided before it has come": ("zero2", instead(Pending, "wait", _finishes_first)),
    "memory that is gathered into is freed": (
        "zero3",
        after(Unit, "begin_unshard", _frees_what_comes),
    ),
    "gradients on their way are freed": (
        "zero2",
        after(FlatGradients, "begin_reduce", lambda one: one.buffer.free_sent()),
    ),
    "gradients on their way are changed": ("zero3", after(FlatGradients, "begin_reduce", _zeroes)),
    "a shard that is gathered is changed": (
        "zero3",
        after(FlatParameters, "begin_unshard", lambda one: one.shard.mul_(2)),
    ),
    "flags on their way are changed": (
        "zero2",
        after(usage.UsageAgreement, "begin", lambda one, *_: one._flags.zero_()),
    ),
    "a message is changed before it is sent up": ("zero2", instead(usage, "sent_up", _overwritten)),
    "copies follow nothing": ("zero2_offload", instead(HostCopier, "running", _after_nothing)),
    "what is copied down is not kept": (
        "zero3_offload",
        instead(WatchedStreams, "keep", lambda *_: None),
    ),
    "what is copied up is used at once": (
        "zero3_host_activations",
        instead(HostCopier, "follow", lambda *_: None),
    ),
    "the host reads what is still copied down": (
        "zero2_offload",
        instead(HostCopier, "finish", lambda _: None),
    ),
    "the host changes what is copied up": (
        "zero2_offload",
        after(HostCopier, "up", lambda _, source, __: source.add_(1)),
    ),
    "another stream reads at once": ("zero2", after(FlatGradients, "begin_reduce", _reads_beside)),
    "another stream is read from at once": (
        "zero2",
        after(FlatGradients, "begin_reduce", _reads_from_beside),
    ),
    "memory that another stream reads is dropped": (
        "shard_ddp",
        after(FlatGradients, "begin_reduce", _drops_what_is_read),
    ),
}
"""By what goes wrong: the strategy, and what puts it there."""


def look(names: Sequence[str]) -> None:
    """Print what is seen in a fit with each planted race, one after the other."""
    prepare()
    for name in names:
        strategy, plant = RACES[name]
        with plant():
            seen = fit_apart(strategy, "32-true")
        print(json.dumps([name, seen.as_dict()]), flush=True)


if __name__ == "__main__":
    look(sys.argv[1:] or list(RACES))
