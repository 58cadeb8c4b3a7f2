"""Jobs over two hosts: they train as one process does, and a host that is cut off is named."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts.namespaces import ADDRESSES, ADDRESSES_6, Hosts, made_hosts
from tests.hosts.program import TIMEOUT_SECONDS, fit

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.* argument"),
]
TOKEN = "a token of both hosts"
PROGRAM = ("-m", "tests.hosts.program")
_PORT = "29500"
_PATIENCE_SECONDS = 240.0


class Run:
    """One command on each host."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        commands: Sequence[Sequence[str]],
        address: str = ADDRESSES[0],
        tokens: Sequence[str] = (TOKEN, TOKEN),
    ) -> None:
        self._hosts = hosts
        self._logs = [folder / f"host{host}" for host in range(2)]
        place = {"MASTER_ADDR": address, "MASTER_PORT": _PORT}
        self.processes = [
            hosts.start(
                host, commands[host], {**place, "LIGHTNING_SHARD_JOB_TOKEN": tokens[host]}, log
            )
            for host, log in enumerate(self._logs)
        ]

    def said(self, host: int) -> str:
        return self._logs[host].read_text(errors="replace")

    def statuses(self) -> list[int]:
        return [process.wait(_PATIENCE_SECONDS) for process in self.processes]

    def totals(self) -> list[float]:
        assert self.statuses() == [0, 0], self.said(0) + self.said(1)
        return [
            float(*re.findall("^total (.*)$", self.said(host), re.MULTILINE)) for host in (0, 1)
        ]

    def wait_for(self, words: str) -> None:
        self._hosts.wait_for(words, self._logs[0])


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with made_hosts() as made:
        yield made


def ours(scheme: str, num_steps: int, seconds: float = 0.0) -> list[list[str]]:
    return [[sys.executable, *PROGRAM, scheme, str(num_steps), str(seconds)]] * 2


def torchrun(num_steps: int) -> list[list[str]]:
    place = [f"--master-addr={ADDRESSES[0]}", f"--master-port={_PORT}"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    program = [*PROGRAM, "zero3", str(num_steps), "0"]
    return [[*start, f"--node-rank={host}", *place, *program] for host in range(2)]


def test_our_launcher(hosts: Hosts, tmp_path: Path) -> None:
    """Gloo took the address of the host's name, which was a loopback one."""
    totals = Run(hosts, tmp_path, ours("zero3", 20)).totals()
    assert totals == pytest.approx([fit("zero3_in_process", 20, 0.0, 2, 1)] * 2, rel=1e-5)


def test_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    totals = Run(hosts, tmp_path, torchrun(20)).totals()
    assert totals == pytest.approx([fit("zero3_in_process", 20, 0.0, 2, 1)] * 2, rel=1e-5)


def test_ipv6(hosts: Hosts, tmp_path: Path) -> None:
    totals = Run(hosts, tmp_path, ours("zero3", 20), address=ADDRESSES_6[0]).totals()
    assert totals == pytest.approx([fit("zero3_in_process", 20, 0.0, 2, 1)] * 2, rel=1e-5)


def test_a_host_with_another_token_is_told_so(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, ours("zero3", 2), tokens=(TOKEN, "a token of another job"))
    assert run.processes[1].wait(_PATIENCE_SECONDS) != 0
    assert "is not this rank's job: it refuses this token" in run.said(1)


def test_a_host_that_is_cut_off_is_named_on_every_survivor(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, ours("zero3", 500, 0.2))
    run.wait_for("step 5")
    hosts.cut()
    assert 0 not in run.statuses()
    for host in range(2):
        [silent] = set(re.findall(rf"rank {1 - host} fell silent for (\d+\.\d) s", run.said(host)))
        assert float(silent) < TIMEOUT_SECONDS


def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off(
    hosts: Hosts, tmp_path: Path
) -> None:
    run = Run(hosts, tmp_path, ours("elastic", 60, 0.2))
    run.wait_for("step 5")
    hosts.cut()
    rank_0, rank_1 = run.statuses()
    assert rank_0 == 0, run.said(0)
    assert "rank 1 fell silent for" in run.said(0)
    assert rank_1 != 0
    assert "fell silent for" in run.said(1)
