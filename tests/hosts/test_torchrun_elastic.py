"""torchrun with a number of hosts that may change, as Kubernetes starts it: a host vanishes."""

import sys
from pathlib import Path

import pytest

from tests.hosts.launching import PORT, TOKEN
from tests.hosts.namespaces import ADDRESSES, named_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
_PATIENCE_SECONDS = 400.0
_NUM_STEPS = 60


def test_the_ranks_that_are_left_are_started_again_and_go_on(tmp_path: Path) -> None:
    logs = [tmp_path / f"log{host}" for host in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=9"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", "--rdzv-id=test"]
    program = ["-m", "tests.hosts.program", "elastic", str(_NUM_STEPS), "0.2"]
    with named_hosts(tmp_path) as hosts:
        for host, address in enumerate(ADDRESSES[:2]):
            command = [*torchrun, f"--local-addr={address}", "--nproc-per-node=1", *program]
            hosts.start(host, command, {"LIGHTNING_SHARD_JOB_TOKEN": TOKEN}, logs[host])
        hosts.wait_for("elastic on 2 ranks", logs[0])
        hosts.wait_for("step 5", logs[0])
        hosts.cut(1)
        hosts.wait_for("elastic on 1 rank ", logs[0])
        status = hosts.first.wait(_PATIENCE_SECONDS)
    said = logs[0].read_text(errors="replace")
    assert status == 0, said
    steps = said.partition("elastic on 1 rank ")[2]
    assert "step 0\n" not in steps  # it went on from snapshots
    assert "total " in steps
