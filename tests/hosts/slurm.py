"""A SLURM of two nodes on the two hosts: munged, slurmctld and a slurmd on each, for one test.

host-a   slurmctld, slurmd     srun, sbatch, scontrol ... are run here
host-b   slurmd

An installed SLURM is used. Else root unpacks Debian's packages into a folder of the tests' own and
installs nothing: where `srun` is on everybody's PATH, Lightning warns in every run.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.namespaces import ADDRESSES, NAMES, Hosts
from tests.processes import REPOSITORY

CPUS_PER_NODE = 4
_UNPACKED = REPOSITORY / "build" / "slurm"
_PATIENCE_SECONDS = 60.0
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={first}({first_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=10
KillWait=20
ReturnToService=2
{plugins}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Programs:
    """Where SLURM's programs are.

    Args:
        root: The folder in which the packages were unpacked; None: they are installed.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def variables(self) -> dict[str, str]:
        """Return what the programs need in their environment."""
        if self._root is None:
            return {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        folders = (f"{self._root}/usr/bin", f"{self._root}/usr/sbin")
        plugins = self._plugins(self._root)
        return {
            "PATH": ":".join((*folders, os.environ["PATH"])),
            "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
        }

    def path(self, name: str) -> str:
        """Return the path of one program; Debian's daemons have names of their own."""
        path = self.variables()["PATH"]
        found = shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)
        if found is None:
            pytest.fail(f"there is no {name}: SLURM is installed in part. {_ADVICE}")
        return found

    def plugins(self) -> str:
        """Return the line of slurm.conf that says where plugins are."""
        return "" if self._root is None else f"PluginDir={self._plugins(self._root)}"

    def _plugins(self, root: Path) -> Path:
        [found] = root.glob("usr/lib/*/slurm-wlm")  # a folder of this machine's architecture
        return found


_ADVICE = (
    "The tests of srun need SLURM: install slurm-wlm and munge, or run `make test-cluster` as root "
    "of a Debian or Ubuntu, where they unpack these packages into build/slurm."
)


@cache
def programs() -> Programs:
    """Return SLURM's programs; unpack them where none are installed."""
    if shutil.which("srun") and shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        return Programs(None)
    if not (_UNPACKED / "usr").exists():
        _unpack()
    return Programs(_UNPACKED)


def _unpack() -> None:
    archives = _UNPACKED / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    fetch = ["apt-get", "install", "--yes", "--download-only", "--reinstall"]
    fetch += ["--no-install-recommends", "-o", f"Dir::Cache::archives={archives}"]
    try:
        _run(["apt-get", "update"])
        _run([*fetch, "slurm-wlm", "munge"])
        for package in archives.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(_UNPACKED)])
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(_UNPACKED)
        told = getattr(error, "stderr", "") or error
        pytest.fail(f"SLURM could not be fetched: {told}. {_ADVICE}")


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class SlurmCluster:
    """A running SLURM."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._programs = programs()
        self.variables = {**self._programs.variables(), "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self._folder.chmod(0o755)
        (self._folder / "slurm.conf").write_text(self._configuration())
        # Nothing is confined, but slurmd looks for a version of cgroups, and finds none mounted.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *NAMES):
            (self._folder / name).mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {
            "--key-file": key,
            "--socket": self._folder / "munge.socket",
            "--log-file": self._folder / "munged.log",
            "--pid-file": self._folder / "munged.pid",
            "--seed-file": self._folder / "munged.seed",
        }
        options = [f"{option}={file}" for option, file in files.items()]
        self._daemon(0, "munged", "--foreground", "--force", *options)
        _until(files["--socket"].exists, lambda: self._log("munged"))
        self._daemon(0, "slurmctld", "-D", "-i")
        for host, name in enumerate(NAMES):
            stepd = self._programs.path("slurmstepd")
            self._daemon(host, "slurmd", "-D", "-N", name, "-d", stepd)
        idle = f"{len(NAMES)} idle"
        _until(
            lambda: idle in self.say("sinfo", "--noheader", "-o", "%D %t"),
            lambda: self._log("slurmctld") + self._log("slurmd"),
        )

    def say(self, *command: str, seconds: float = _PATIENCE_SECONDS) -> str:
        """Run one of SLURM's commands on host-a; return what it says."""
        done = subprocess.run(
            [*self._hosts.enter(0), self._programs.path(command[0]), *command[1:]],
            env=os.environ | self.variables,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert done.returncode == 0, (command, done.stdout, self._log("slurmctld"))
        return done.stdout

    def job_state(self, job: str) -> str:
        """Return a job's state, as scontrol has it: RUNNING, COMPLETED ..."""
        told = self.say("scontrol", "show", "job", job)
        return told.split("JobState=")[1].split()[0]

    def _daemon(self, host: int, name: str, *options: str) -> None:
        command = [self._programs.path(name), *options]
        log = self._folder / f"{name}.{host}.out"
        self._hosts.start(host, command, self.variables, log)

    def _log(self, name: str) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
            for log in self._folder.glob(f"{name}*")
            if log.suffix in (".out", ".log")
        )

    def _configuration(self) -> str:
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={CPUS_PER_NODE}"
            for name, address in zip(NAMES, ADDRESSES, strict=False)
        ]
        return _CONFIGURATION.format(
            first=NAMES[0],
            first_address=ADDRESSES[0],
            folder=self._folder,
            plugins=self._programs.plugins(),
            nodes="\n".join(nodes),
        )


def _until(holds: Any, told: Any) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


def batch_script(path: Path, options: Sequence[str], command: Sequence[str]) -> Path:
    """Write a script for sbatch that runs one srun."""
    lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in options)]
    path.write_text("\n".join([*lines, shlex.join(["srun", *command])]) + "\n")
    return path
