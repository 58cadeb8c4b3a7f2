"""Links that are slow, filtered or cut, and names that stand for several addresses."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.hosts.launching import PORT, TOKEN, ours
from tests.hosts.namespaces import ADDRESSES, ADDRESSES_6, Hosts, made_hosts, named_hosts
from tests.hosts.page import TOLERANCE
from tests.hosts.program import TIMEOUT_SECONDS
from tests.hosts.schemes import in_process

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.* argument"),
]
_PATIENCE_SECONDS = 400.0
_MEGABITS = 20.0
_NOT_THERE = "10.77.0.99"


def run(hosts: Hosts, folder: Path, *words: str, **variables: str) -> tuple[list[int], list[str]]:
    """Run a module with `words` on each of two hosts; return the statuses, and what each said."""
    logs = [folder / f"log{host}" for host in range(2)]
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "LIGHTNING_SHARD_JOB_TOKEN": TOKEN}
    command = [sys.executable, "-m", *words]
    processes = [
        hosts.start(host, command, place | variables, log) for host, log in enumerate(logs)
    ]
    statuses = [process.wait(_PATIENCE_SECONDS) for process in processes]
    return statuses, [log.read_text(errors="replace") for log in logs]


def test_a_slow_link_changes_no_loss(tmp_path: Path) -> None:
    with named_hosts(tmp_path) as hosts:
        hosts.slow_down(_MEGABITS)
        program = ["-m", "tests.hosts.schemes", "gloo", "2", "2", str(tmp_path), "zero3"]
        logs = [tmp_path / f"log{host}" for host in range(2)]
        variables = {"LIGHTNING_SHARD_JOB_TOKEN": TOKEN}
        processes = [
            hosts.start(host, command, variables, logs[host])
            for host, command in enumerate(ours(hosts, tmp_path, program, 2))
        ]
        statuses = [process.wait(_PATIENCE_SECONDS) for process in processes]
    assert statuses == [0, 0], "".join(log.read_text(errors="replace") for log in logs)
    losses = json.loads((tmp_path / "rank0.json").read_text())["losses"]["zero3"]
    assert losses == pytest.approx(in_process("zero3"), rel=TOLERANCE)


def test_a_filtered_port_is_named_on_both_hosts(tmp_path: Path) -> None:
    """A firewall that drops gives no answer: nothing but the time-out ends the waiting."""
    with made_hosts() as hosts:
        hosts.filter(0, int(PORT), int(PORT))
        statuses, said = run(hosts, tmp_path, "tests.hosts.program", "zero3", "2", "0")
    assert 0 not in statuses
    for one in said:
        assert f"could not meet the others at MASTER_ADDR={ADDRESSES[0]}, MASTER_PORT={PORT}" in one
    assert "1 of 2 ranks have come: 0. Not yet: 1." in said[0]
    assert "see whether it runs, and whether this host reaches its address and port" in said[1]


def test_ports_of_ranks_that_are_filtered_are_named_on_both_hosts(tmp_path: Path) -> None:
    """They had met, and were told to look at the port at which they had met."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with made_hosts() as hosts:
        hosts.filter(0, int(first), int(last))
        statuses, said = run(hosts, tmp_path, "tests.hosts.program", "zero3", "2", "0")
    assert 0 not in statuses
    for host, one in enumerate(said):
        assert f"Rank {host} of 2 met the others at {ADDRESSES[0]}, port {PORT}, but within" in one
        assert f"ports {first} to {last} of their hosts" in one
        assert f"from and to {ADDRESSES[host]} here" in one


@pytest.mark.parametrize("first", [_NOT_THERE, ADDRESSES_6[0]])
def test_a_name_may_stand_for_several_addresses(first: str, tmp_path: Path) -> None:
    """The first may be one that nobody answers at, or of the other family."""
    with named_hosts(tmp_path) as hosts:
        known = hosts.hosts_file.read_text()
        hosts.hosts_file.write_text(f"{first} rank-0\n{ADDRESSES[0]} rank-0\n{known}")
        place = {"MASTER_ADDR": "rank-0"}
        statuses, said = run(hosts, tmp_path, "tests.hosts.program", "zero3", "5", "0", **place)
    assert statuses == [0, 0], "".join(said)
    totals = {re.findall("^total (.*)$", one, re.MULTILINE)[0] for one in said}
    assert len(totals) == 1


def test_two_of_three_hosts_go_on_without_the_one_that_is_cut_off(tmp_path: Path) -> None:
    logs = [tmp_path / f"log{host}" for host in range(3)]
    variables = {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": PORT,
        "LIGHTNING_SHARD_JOB_TOKEN": TOKEN,
        "NUM_NODES": "3",
    }
    command = [sys.executable, "-m", "tests.hosts.program", "elastic", "60", "0.2"]
    with made_hosts(3) as hosts:
        processes = [hosts.start(host, command, variables, log) for host, log in enumerate(logs)]
        hosts.wait_for("step 5", logs[0])
        hosts.cut(2)
        statuses = [process.wait(_PATIENCE_SECONDS) for process in processes]
    said = [log.read_text(errors="replace") for log in logs]
    assert statuses[:2] == [0, 0], said
    assert statuses[2] != 0
    for one in said[:2]:
        [silent] = set(re.findall(r"rank 2 fell silent for (\d+\.\d) s", one))
        assert float(silent) < TIMEOUT_SECONDS
    assert len({re.findall("^total (.*)$", one, re.MULTILINE)[0] for one in said[:2]}) == 1
