"""What a rank's handle of a group is, apart from its collectives: names, checks, and posting."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.in_process import _c10d
from lightning_shard.backends.in_process.call_site import find_call_site
from lightning_shard.backends.in_process.calls import Call, describe_tensor, tensor_key
from lightning_shard.backends.in_process.reductions import op_name
from lightning_shard.backends.in_process.streams import mark_stream
from lightning_shard.backends.in_process.work import CoalescedWork, InProcessWork
from lightning_shard.backends.in_process.world import World, current_world
from lightning_shard.errors import ConfigError


class GroupHandle(_c10d.ProcessGroupBase):
    """One rank's handle of one group.

    Args:
        world: The world that runs.
        name: c10d's name of the group, the same on each of its ranks.
        global_ranks: The group's ranks, in its own order.
        rank: This rank's number in the group.
    """

    def __init__(self, world: World, name: str, global_ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(rank, len(global_ranks))
        self._world, self._group_rank = world, rank
        self._channel = world.channel(name, global_ranks)
        self._coalesced: list[InProcessWork] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        """Return itself: a handle holds no state that could be copied."""
        return self

    def __repr__(self) -> str:
        return f"InProcessGroup(rank {self._group_rank} of {self._channel})"

    def _post(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        *,
        agreed: tuple[object, ...] | None = None,
        reduce_op: Any = None,
        root: int = -1,
        tag: int | None = None,
        results: Sequence[Any] | None = None,
    ) -> InProcessWork:
        """Tell the group what this rank wants; `agreed` is what its peers must give alike."""
        if self._world is not current_world():
            raise ConfigError(f"{op}: {self!r} belongs to an in-process world that has ended.")
        kind = None if reduce_op is None else op_name(reduce_op)
        key = tensor_key(inputs) if agreed is None else agreed
        call = Call(
            op,
            self._group_rank,
            inputs,
            outputs,
            (op, kind, root, key),
            find_call_site(),
            reduce_op,
            root,
            mark_stream(inputs or outputs),
        )
        meeting = self._world.post(self._channel, call, tag)
        work = InProcessWork(self._world, meeting, call, outputs if results is None else results)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_sizes(self, op: str, small: Sequence[Tensor], large: Sequence[Tensor]) -> None:
        """Raise unless each large tensor holds one small one of each rank."""
        for one, all_of_them in zip(small, large, strict=True):
            if one.numel() * self.size() != all_of_them.numel() or one.dtype != all_of_them.dtype:
                raise ConfigError(
                    f"Rank {self._group_rank} of {self._channel}: {op} got "
                    f"{describe_tensor(one)} and {describe_tensor(all_of_them)}, expected the "
                    f"second to hold {self.size()} of the first, in the same dtype."
                )

    def _split_rows(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        if not sizes:
            if tensor.shape[0] % self.size():
                raise ConfigError(
                    f"Rank {self._group_rank} of {self._channel}: all_to_all_single got "
                    f"{tensor.shape[0]} rows, expected a multiple of {self.size()}, or split sizes."
                )
            sizes = [tensor.shape[0] // self.size()] * self.size()
        return list(torch.split(tensor.detach(), list(sizes)))

    # --- what c10d asks of a group ----------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """Return the backend's name."""
        return _c10d.BACKEND_NAME

    def _get_backend_name(self) -> str:
        return _c10d.BACKEND_NAME

    @property
    def group_name(self) -> Any:
        """c10d's name of the group; torch keeps it in a backend, which a Python group has not."""
        return self._channel.name

    @property
    def group_desc(self) -> str:
        """What c10d calls the group in its logs."""
        return str(self._channel)

    def getGroupName(self) -> str:  # noqa: N802 - what C++ calls
        """Return c10d's name of the group."""
        return self._channel.name

    def getGroupDesc(self) -> str:  # noqa: N802 - what C++ calls
        """Return what c10d calls the group in its logs."""
        return str(self._channel)

    def _get_backend(self, device: torch.device) -> _c10d.BackendStandIn:
        del device
        return _c10d.BackendStandIn()

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.count(self._group_rank)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 1."""

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> CoalescedWork:
        del device
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: what can never end is found at once."""

    def shutdown(self) -> None:
        """Do nothing: the world forgets its groups when it ends."""

    def abort(self) -> None:
        """Do nothing, as `shutdown`."""
