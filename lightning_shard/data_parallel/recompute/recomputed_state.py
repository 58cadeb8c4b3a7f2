"""What a block's recomputation draws and changes beside its tensors: as if there were none.

random numbers of Python and numpy    drawn again, and put back; torch's checkpoint has its own
running statistics of norms           left as they are, since no result in training needs them
attributes of the block's modules     as forward has left numbers, texts, tensors and lists
other buffers, parameters             refused where a recomputation changes them
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.content import content
from lightning_shard.data_parallel.offload.activations import ChangedError
from lightning_shard.data_parallel.torch_private import BatchNorm
from lightning_shard.errors import ConfigError

_PLAIN = (type(None), bool, int, float, str, Tensor)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class Drawn:
    """The random numbers of Python and numpy that a forward draws; torch's are its checkpoint's."""

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Run a forward inside."""
        before = random.getstate(), np.random.get_state(legacy=False)
        yield
        after = random.getstate(), np.random.get_state(legacy=False)
        if not _same_states(before, after):
            self._before = before

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw inside what the forward has drawn."""
        if self._before is None:
            yield
            return
        present = random.getstate(), np.random.get_state(legacy=False)
        _set_states(self._before)
        try:
            yield
        finally:
            _set_states(present)


def _same_states(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    ours, others = one[1]["state"], other[1]["state"]
    same = ours["pos"] == others["pos"] and np.array_equal(ours["key"], others["key"])
    return bool(same) and one[0] == other[0]


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm that updates running statistics in training."""
    return isinstance(module, (BatchNorm, *_INSTANCE_NORMS)) and module.track_running_stats


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Leave running statistics inside as they are: in training no result depends on them."""
    norms: list[Any] = [one for one in block.modules() if has_statistics(one) and one.training]
    with ExitStack() as kept:
        for norm in norms:  # a momentum of 0 is that of what a batch adds
            counted = norm.num_batches_tracked.clone()
            kept.enter_context(setting(norm, momentum=0.0, num_batches_tracked=counted))
        yield


@contextmanager
def attributes_kept(block: nn.Module) -> Iterator[None]:
    """Leave plain attributes of a block's modules as they are: counters, lists, a kept tensor."""
    kept = [
        (home, dict(home), {name: len(one) for name, one in home.items() if type(one) is list})
        for home in map(vars, block.modules())
    ]
    try:
        yield
    finally:
        for home, before, lengths in kept:
            for attribute in [one for one in home if one not in before]:
                if isinstance(home[attribute], _PLAIN):
                    del home[attribute]
            for attribute, value in before.items():
                if isinstance(value, _PLAIN) and home.get(attribute) is not value:
                    home[attribute] = value
            for attribute, length in lengths.items():
                del before[attribute][length:]


@having(asker, value=Asker.ENGINE)
def _contents(block: nn.Module) -> dict[str, Tensor]:
    """Return what tells whether a block's parameters, as they are here, have changed."""
    return {path: content(param.data) for path, param in block.named_parameters()}


@contextmanager
def buffers_watched(block: nn.Module, name: str) -> Iterator[None]:
    """Refuse a block whose recomputation inside changes its buffers or parameters."""
    before = {path: buffer.detach().clone() for path, buffer in block.named_buffers()}
    marks = _contents(block)
    try:
        yield
    finally:
        for path, now in _contents(block).items():
            if path in marks and not torch.equal(marks[path], now):
                raise ConfigError(
                    f"The forward of {name!r} ({type(block).__name__}) changes its parameter "
                    f"{path!r}, and so does the recomputation of its activations, once more; "
                    f"expected a change that does nothing the second time, such as clamp_. Change "
                    f"it in a hook, such as on_before_optimizer_step, name the classes of other "
                    f"modules in activation_checkpointing, or leave it out."
                )
        for path, buffer in block.named_buffers():
            if path in before and not _equal(before[path], buffer):
                raise ConfigError(
                    f"The forward of {name!r} ({type(block).__name__}) changes its buffer "
                    f"{path!r}, and so does the recomputation of its activations, which then "
                    f"computes something else; expected a forward that changes running statistics "
                    f"of batch norms at most. Name the classes of other modules in "
                    f"activation_checkpointing, or leave it out."
                )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point():
        return bool(torch.equal(one.nan_to_num(), other.detach().nan_to_num()))
    return bool(torch.equal(one, other))


@contextmanager
def explained(block: nn.Module, name: str) -> Iterator[None]:
    """Say what to do where a result that was kept has been changed."""
    try:
        yield
    except ChangedError as error:
        raise ConfigError(
            f"activation_checkpointing='selective' keeps results of matrix products in "
            f"{name!r} ({type(block).__name__}), but one was changed in place since ({error}). "
            f"Use activation_checkpointing='full', or take what works in place out of the block "
            f"(inplace=True)."
        ) from error
