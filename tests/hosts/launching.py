"""The commands by which each launcher starts a program's ranks on two hosts.

our launcher, torchrun   the same command on each host
mpirun                   a command on host-a, which starts a daemon on host-b as by ssh
srun                     a command on host-a; slurmd starts the ranks
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hosts.namespaces import ADDRESSES, NAMES, Hosts
from tests.mpirun import MPIRUN
from tests.processes import REPOSITORY

PORT = "29500"
TOKEN = "a token of both hosts"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2")
Commands = list[list[str]]


def ours(hosts: Hosts, folder: Path, program: Sequence[str], per_host: int) -> Commands:
    """Return what a user types on each host, with NODE_RANK, MASTER_ADDR and MASTER_PORT set."""
    return [["env", f"NODE_RANK={host}", *_place(), sys.executable, *program] for host in range(2)]


def torchrun(hosts: Hosts, folder: Path, program: Sequence[str], per_host: int) -> Commands:
    """Return torchrun with a fixed address of rank 0."""
    place = [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
    return [
        [*_TORCHRUN, *place, f"--node-rank={host}", f"--nproc-per-node={per_host}", *program]
        for host in range(2)
    ]


def torchrun_c10d(hosts: Hosts, folder: Path, program: Sequence[str], per_host: int) -> Commands:
    """Return torchrun whose agents meet and number the hosts themselves."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:{PORT}", "--rdzv-id=test"]
    return [[*_TORCHRUN, *meeting, f"--nproc-per-node={per_host}", *program]] * 2


def mpirun(hosts: Hosts, folder: Path, program: Sequence[str], per_host: int) -> Commands:
    """Return mpirun with a host file; what stands for ssh goes into the other namespace."""
    host_file, agent = folder / "hosts", folder / "agent"
    host_file.write_text("".join(f"{name} slots={per_host}\n" for name in NAMES))
    agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(hosts.enter(1))} sh -c "$*"\n')
    agent.chmod(0o700)
    forwarded = [
        word for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)
    ]
    return [
        [
            *(MPIRUN, "--allow-run-as-root", "--prtemca", "plm_ssh_agent", str(agent)),
            *("--hostfile", str(host_file), "-n", str(2 * per_host), "--map-by", "slot"),
            *("--wdir", str(REPOSITORY), *forwarded, "--bind-to", "none"),
            *(sys.executable, *program),
        ]
    ]


def srun(hosts: Hosts, folder: Path, program: Sequence[str], per_host: int) -> Commands:
    """Return srun, for hosts on which SLURM runs."""
    return [["srun", "--nodes=2", f"--ntasks-per-node={per_host}", sys.executable, *program]]


LAUNCHERS: dict[str, Callable[[Hosts, Path, Sequence[str], int], Commands]] = {
    "our launcher": ours,
    "torchrun": torchrun,
    "torchrun, c10d": torchrun_c10d,
    "mpirun": mpirun,
    "mpirun, MPI": mpirun,
    "srun": srun,
}


def _place() -> list[str]:
    return [f"MASTER_ADDR={ADDRESSES[0]}", f"MASTER_PORT={PORT}"]
