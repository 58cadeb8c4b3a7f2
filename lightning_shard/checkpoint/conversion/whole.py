"""A folder as the dictionary of a whole checkpoint, for Lightning's `load_from_checkpoint`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.checkpoint.conversion.unread import exchanged
from lightning_shard.checkpoint.conversion.verifying import verify

_STATES = "optimizer_states"


class UnreadStates(Sequence[Any]):
    """The optimizers' states, which are read when somebody asks for one: a model needs none.

    Args:
        states: With unread tensors.
        read: Returns one with its tensors.
    """

    def __init__(self, states: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._states, self._read = states, read

    @override
    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        return self._read(self._states[index])


def whole_checkpoint(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder, which is compared with its checksums first.

    Args:
        path: Local, or any path of fsspec's.
        map_location: As in `torch.load`: where its tensors, which lie on the CPU, are wanted.
        weights_only: As in `torch.load`, of what is no tensor.

    Raises:
        CheckpointError: It is damaged, not complete, or no checkpoint.
    """
    verify(path)
    checkpoint = open_source(path, objects=True, trust=weights_only is False).checkpoint

    def read(nested: Any) -> Any:
        return exchanged(nested, lambda one: _mapped(one.read(), map_location))

    states = checkpoint.pop(_STATES, None)
    whole: dict[str, Any] = read(checkpoint)
    if states is not None:
        whole[_STATES] = UnreadStates(states, read)
    return whole


def _mapped(tensor: Tensor, map_location: Any) -> Tensor:
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if isinstance(map_location, (str, int, torch.device)):
        return tensor.to(map_location)
    storage = map_location(tensor.untyped_storage(), "cpu")
    return tensor if storage is None else tensor.to(storage.device)
