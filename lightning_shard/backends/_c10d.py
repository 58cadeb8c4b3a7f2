"""Every private name of `torch.distributed` that the backends touch.

Checked with torch 2.11 to 2.15; `tests/backends/test_c10d.py` fails when one changes. A
cooperative world gives each rank a `RankGroups` in place of c10d's global `_world`, which it swaps
whenever another rank runs; c10d makes in-process groups and uses the world's store meanwhile.
"""

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

__all__ = ["HashStore", "PrefixStore", "ProcessGroupBase", "Store", "StoreBase", "TCPStore"]

# torch 2.13 renamed `reduce_scatter_tensor` and `all_gather_into_tensor`: the old names warn from
# then on, and the new ones are unknown before.
if hasattr(dist, "reduce_scatter_single"):
    reduce_scatter_flat = dist.reduce_scatter_single
    all_gather_flat = dist.all_gather_single
else:
    reduce_scatter_flat = dist.reduce_scatter_tensor
    all_gather_flat = dist.all_gather_into_tensor

if TYPE_CHECKING:

    class ProcessGroupBase:
        """`ProcessGroup` as Python sees it; the stubs tell of C++ overloads only."""

        def __init__(self, rank: int, size: int) -> None: ...
        def size(self) -> int: ...
        def rank(self) -> int: ...

    class StoreBase:
        """`Store` as Python sees it."""
else:
    ProcessGroupBase, StoreBase = dist.ProcessGroup, Store


def _own_map(name: str) -> Any:
    return property(lambda groups: groups.maps.setdefault(name, {}))


class RankGroups(c10d._World):
    """One rank's process groups: c10d's `_World` with maps and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: dict[str, dict[Any, Any]] = {}

    pg_map = _own_map("pg_map")  # by group, its backend's name and its store
    pg_names = _own_map("pg_names")  # by group, its name
    pg_group_ranks = _own_map("pg_group_ranks")  # by group, {global rank: group rank}
    pg_backend_config = _own_map("pg_backend_config")  # by group, its backend configuration
    tags_to_pg = _own_map("tags_to_pg")  # by tag, its groups
    pg_to_tag = _own_map("pg_to_tag")  # by group, its tag
    pg_flight_recorder_hooks = _own_map("pg_flight_recorder_hooks")  # by group, of torch 2.15

    group_count = 0  # groups that were made, from which c10d takes the next one's name


def current_groups() -> Any:
    """Return what c10d's `_world` is now."""
    return c10d._world


def set_groups(groups: Any) -> None:
    """Make `groups` c10d's `_world`."""
    c10d._world = groups


def init_default_group(*args: Any, **kwargs: Any) -> None:
    """Make the default group as c10d does; uncaught errors name the rank's present number alone."""
    hook = getattr(sys.excepthook, "before_groups", sys.excepthook)
    sys.excepthook = hook
    dist.init_process_group(*args, **kwargs)
    if sys.excepthook is not hook:
        setattr(sys.excepthook, "before_groups", hook)  # noqa: B010  (a function attribute)


def forget_groups() -> None:
    """Drop the groups of the rank whose thread this is; it must be the running rank."""
    groups = c10d._world
    if groups.default_pg is not None:
        dist.destroy_process_group()
    torch._C._distributed_c10d._unregister_all_process_groups()


def live_backends() -> list[Any]:
    """Return the backends that carry out the operations of this process's groups."""
    return [backend for group in list(c10d._world.pg_map) for backend in backends_of(group)]


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return a group's backends, one for each device type; a group written in Python is its own."""
    if type(group) is not dist.ProcessGroup:
        return [group]
    return [group._get_backend(device) for device in group._device_types]


def register_backend(
    name: str, make_group: Callable[[Any, Any], Any], devices: Sequence[str]
) -> None:
    """Tell c10d about a backend; `make_group` takes its `_DistributedBackendOptions`."""
    if name.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(name, make_group, extended_api=True, devices=list(devices))
        # torch 2.15 attaches its recorder to groups of C++ backends, which these do not have.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(name)


def object_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of tensors in which a group's ranks send each other objects."""
    return torch.device(c10d._get_object_coll_device(group))


def exchange_objects_as(pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> None:
    """Have c10d's own object collectives, which pickle, pack and unpack by these from now on."""
    patched = cast(Any, c10d)

    def object_to_tensor(
        obj: Any, device: Any, group: Any, weights_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = pack(_saved(obj) if weights_only else obj)
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        data = data.to(device, copy=True)  # c10d resizes it
        return data, torch.tensor([data.numel()], dtype=torch.long, device=device)

    def tensor_to_object(
        tensor: torch.Tensor, tensor_size: Any, group: Any, weights_only: bool = False
    ) -> Any:
        obj = unpack(tensor.cpu().numpy().tobytes()[: int(tensor_size)])
        return torch.load(io.BytesIO(obj), weights_only=True) if weights_only else obj

    patched._object_to_tensor, patched._tensor_to_object = object_to_tensor, tensor_to_object


def _saved(obj: Any) -> bytes:
    """Return an object as `torch.save` writes it, for callers on torch 2.14 who load no code."""
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


Rendezvous = Callable[[int, int], tuple[Store, int, int]]


@contextmanager
def in_process_c10d(backend_name: str, rendezvous: Rendezvous) -> Iterator[None]:
    """Make every new group an in-process one, and every rendezvous the world's."""
    patched, private = cast(Any, c10d), cast(Any, torch._C._distributed_c10d)
    original_helper, original_rendezvous = patched._new_process_group_helper, patched.rendezvous
    groups = patched._world

    def new_group(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend_options", None)  # another backend's options mean nothing here
        made, store = original_helper(
            size, rank, ranks, c10d.Backend(backend_name), *args[:2], **kwargs
        )
        if backend == c10d.Backend.GLOO and made in c10d._world.pg_map:
            # `monitored_barrier` insists on the name.
            c10d._world.pg_map[made] = (backend, store)
        return made, store

    def meet(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        yield rendezvous(rank, world_size)

    patched._new_process_group_helper, patched.rendezvous = new_group, meet
    private._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        private._unregister_all_process_groups()  # this thread's, should Ctrl-C have left some
        private._set_thread_isolation_mode(False)
        patched._new_process_group_helper = original_helper
        patched.rendezvous = original_rendezvous
        patched._world = groups
        outer = groups.default_pg
        private._set_global_rank(-1 if outer is None else outer.rank())


class BackendStandIn:
    """Answers c10d's questions to the backend behind a group; a Python group has no backend."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False


def forget_dtensor_operations() -> None:
    """Let go of what torch remembers, for this thread, of operations on DTensors."""
    torch._C._clear_DTensor_sharding_propagator_cache()
