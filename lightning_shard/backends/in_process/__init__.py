"""Ranks as threads of one process, one running at a time, switched at collectives.

run_ranks / launcher ─► World.run ─► RanksRun ─► Scheduler (the token, deadlocks)
                            │                         └─ RankGlobals (swapped at each switch)
torch.distributed ─► InProcessGroup ─► World.post ─► Channel (the arithmetic)
                            └─ InProcessWork.wait ─► Scheduler.wait
"""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import Store
from lightning_shard.backends.base import Backend
from lightning_shard.backends.calls import Call
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import CallWork, ranks_of
from lightning_shard.backends.in_process.channel import Meeting
from lightning_shard.backends.in_process.world import BACKEND_NAME, World, current_world
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.streams import join_streams, mark_stream
from lightning_shard.errors import ConfigError

_HOW_TO_USE = (
    "The in_process backend works inside an in-process world only. Train with a strategy whose "
    "name ends in _in_process, or call your function with lightning_shard.testing.run_ranks(fn, 4)."
)


class InProcessWork(CallWork):
    """One rank's handle of one operation; its future is done, since torch's DDP blocks on it."""

    def __init__(self, world: World, meeting: Meeting, call: Call):
        super().__init__(call)
        self._world, self._meeting = world, meeting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the other ranks run until the results are there, or raise when they can never be."""
        del timeout
        if not self._meeting.done:
            self._world.wait_for(self._meeting, self._call)
        join_streams(self._meeting.finished)
        return True

    def is_completed(self) -> bool:
        """Whether the results are there; if not, the other ranks run once before the answer."""
        if not self._meeting.done:
            self._world.poll(self._meeting, self._call)
        return self._meeting.done

    def is_success(self) -> bool:
        """Whether the results are there; no other rank runs meanwhile."""
        return self._meeting.done

    def _source(self) -> int:
        return self._meeting.source


class InProcessGroup(PythonGroup):
    """One rank's handle of one group."""

    backend_name = BACKEND_NAME

    def __init__(self, world: World, options: Any) -> None:
        name, global_ranks = options.group_id, ranks_of(options)
        super().__init__(name, global_ranks, options.group_rank)
        self._world = world
        self._channel = world.channel(name, global_ranks)

    @override
    def _start(self, call: Call) -> InProcessWork:
        if self._world is not current_world():
            raise ConfigError(f"{call.op}: {self!r} belongs to an in-process world that has ended.")
        call.posted = mark_stream(call.inputs or call.outputs)
        return InProcessWork(self._world, self._world.post(self._channel, call), call)


def _require_world() -> World:
    world = current_world()
    if world is None:
        raise ConfigError(_HOW_TO_USE)
    return world


def _make_group(options: Any, backend_options: Any) -> InProcessGroup:
    """Make the running rank's handle of a group; c10d calls this function."""
    del backend_options
    return InProcessGroup(_require_world(), options)


class InProcessBackend(Backend):
    """Ranks as threads, switched at collectives; for tests, notebooks, and many ranks per GPU."""

    name: ClassVar[str] = BACKEND_NAME
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def unavailable_reason(self) -> str | None:
        """Return None: it needs nothing that torch does not bring."""
        return None

    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        """Start the running rank's default group, over the world's own store if none is given."""
        del device
        world = _require_world()
        own_rank, size = world.group_rank
        if (rank, world_size) != (own_rank, size):
            raise ConfigError(
                f"in_process: got rank={rank}, world_size={world_size}, expected {own_rank} and "
                f"{size}, as in the in-process world that runs."
            )
        dist.init_process_group(
            self.name,
            store=world.new_init_store() if store is None else store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Wrap a group; in a world that is like Gloo, in the exchanges that Gloo's groups have."""
        world = current_world()
        is_like_gloo = world is not None and world.is_like_gloo
        return (ExchangeCollectives if is_like_gloo else Collectives)(group)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu", "cuda"])
