"""Makes torch's own Gloo and NCCL groups, as c10d does, which debug groups hand calls over to.

c10d's private names that this needs are here alone;
`tests/backends/debug_wrapper/test_conformance.py` fails when one changes.
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.backends._c10d import PrefixStore


def debug_name(backend: str) -> str:
    """Return the name under which c10d knows the debug wrapper of a backend."""
    return f"checked_{backend}"


def make_gloo(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make a Gloo group from c10d's `_DistributedBackendOptions`."""
    del backend_options
    backend: Any = dist.ProcessGroupGloo(
        _own_corner(options), options.group_rank, options.group_size, timeout=options.timeout
    )
    return _as_group(options, backend, "cpu", dist.ProcessGroup.BackendType.GLOO)


def make_nccl(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make an NCCL group from c10d's `_DistributedBackendOptions`."""
    settings: Any = backend_options or dist.ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    backend: Any = dist.ProcessGroupNCCL(
        _own_corner(options), options.group_rank, options.group_size, settings
    )
    return _as_group(options, backend, "cuda", dist.ProcessGroup.BackendType.NCCL)


def _own_corner(options: Any) -> Any:
    """Return a prefix of the group's store that no earlier group of its name has used.

    The store still holds the addresses of a destroyed group, and an early rank would call them.
    """
    generation = options.store.add(f"inner/generation/{options.group_rank}", 1)
    return PrefixStore(f"inner/{generation}", options.store)


def _as_group(options: Any, backend: Any, device_type: str, kind: Any) -> dist.ProcessGroup:
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    backend._set_sequence_number_for_group()
    make_group: Any = dist.ProcessGroup
    group = make_group(options.store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    group._set_group_name(options.group_id)
    return group  # type: ignore[no-any-return]


def carriers(group: Any) -> list[Any]:
    """Return what carries out a group's operations: the group itself, or torch's backends in it."""
    if type(group) is not dist.ProcessGroup:
        return [group]
    return [group._get_backend(device) for device in group._device_types]
