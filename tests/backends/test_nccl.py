"""Collectives over NCCL: one rank to a device, so one rank on a host with one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard import settings
from lightning_shard.backends.nccl import NCCLBackend
from tests.backends import conformance
from tests.processes import run_processes


def conform() -> dict[str, str]:
    rank, world_size = settings.rank_and_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    backend = NCCLBackend()
    backend.check(device)
    backend.init_process_group(
        rank=rank, world_size=world_size, device=device, timeout=timedelta(seconds=60)
    )
    assert dist.group.WORLD is not None
    with device:
        failures = conformance.run_checks(backend.collectives(dist.group.WORLD))
    dist.destroy_process_group()
    return failures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_conformance() -> None:
    for failures in run_processes(conform, torch.cuda.device_count()):
        assert not failures, "\n".join(failures.values())
