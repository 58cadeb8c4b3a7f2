"""An elastic job without a Trainer, for tests: ranks add up until they are told to end.

    python -m tests.elastic.program FOLDER NUM_RANKS

Each rank writes a line for each generation into FOLDER/<its process>: its members' number, what it
ended with. A file FOLDER/end ends the job at the next boundary.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_shard.backends.base import GlooBackend
from lightning_shard.core import settings
from lightning_shard.elastic.membership.generation import Generation, GroupSetup
from lightning_shard.elastic.membership.launcher import ElasticLauncher
from lightning_shard.elastic.membership.rendezvous_server import JobRules
from lightning_shard.elastic.membership.served_membership import ServedMembership
from lightning_shard.environments.elastic import ElasticEnvironment, elastic_environment
from lightning_shard.errors import RankFailedError

TIMEOUT = timedelta(seconds=60)


def main(folder: Path, num_ranks: int) -> None:
    environment = elastic_environment(LightningEnvironment())
    assert isinstance(environment, ElasticEnvironment)
    rules = JobRules(initial_size=num_ranks, timeout_seconds=TIMEOUT.total_seconds())
    environment.set_global_rank(environment.local_rank())
    environment.set_world_size(num_ranks)
    ElasticLauncher(environment, num_ranks, 1, rules).launch(run, environment, folder)


def run(environment: ElasticEnvironment, folder: Path) -> None:
    torch.set_num_threads(1)
    initial_rank = None if environment.is_newcomer else environment.local_rank()
    job = settings.job()
    assert job is not None
    membership = ServedMembership(job, initial_rank, TIMEOUT)
    generation = membership.begin() or membership.following()
    log = (folder / str(os.getpid())).open("w", buffering=1)
    while True:
        environment.admit(generation.rank, generation.size)
        print(f"{generation.number} {generation.rank}/{generation.size}", file=log)
        is_over = take_part(membership, generation, folder)
        membership.drop_groups()
        print(f"fds {len(os.listdir('/proc/self/fd'))}", file=log)
        if is_over:
            break
        generation = membership.following()
    membership.leave()
    print("end", file=log)
    log.close()


def take_part(membership: ServedMembership, generation: Generation, folder: Path) -> bool:
    """Add up until there is a change; return whether the job ends."""
    try:
        membership.init_groups(generation, GroupSetup(GlooBackend(), torch.device("cpu"), TIMEOUT))
        collectives = GlooBackend().collectives(dist.group.WORLD)
        while True:
            total = torch.ones(1000)
            collectives.all_reduce(total, "sum").wait()
            assert total[0] == generation.size
            flags = torch.tensor([membership.is_wanted, (folder / "end").exists()]).int()
            collectives.all_reduce(flags, "max").wait()
            if flags.any():
                return bool(flags[1])
    except RankFailedError:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
