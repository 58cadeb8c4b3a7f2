"""The process group of one rank in an in-process world."""

from typing import ClassVar

from typing_extensions import override

from lightning_shard.backends.calls import Call
from lightning_shard.backends.in_process.work import InProcessWork
from lightning_shard.backends.in_process.world import BACKEND_NAME, World, current_world
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.streams import mark_stream
from lightning_shard.errors import ConfigError


class InProcessGroup(PythonGroup):
    """One rank's handle of one group.

    Args:
        world: The in-process world that runs.
        name: Name of the group in c10d, the same on each of its ranks.
        global_ranks: Global ranks of the group's members, in order of their group rank.
        rank: This rank's number in the group.
    """

    backend_name: ClassVar[str] = BACKEND_NAME

    def __init__(self, world: World, name: str, global_ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(name, global_ranks, rank)
        self._world = world
        self._channel = world.channel(name, global_ranks)

    @override
    def _start(self, call: Call) -> InProcessWork:
        if self._world is not current_world():
            raise ConfigError(f"{call.op}: {self!r} belongs to an in-process world that has ended.")
        call.posted = mark_stream(call.inputs or call.outputs)
        return InProcessWork(self._world, self._world.post(self._channel, call), call)
