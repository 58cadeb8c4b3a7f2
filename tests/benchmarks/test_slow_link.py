"""Two hosts on one machine, and the race between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.namespaces import two_hosts, why_not
from tests.benchmarks.slow_link import Place, race

LOOPBACK = Place((), "lo", "127.0.0.1")
ANSWER = """
import json, socket
with socket.create_server(("{address}", 0)) as server:
    print(json.dumps(server.getsockname()[1]), flush=True)
    print(server.accept()[0].recv(4).decode())
"""
CALL = "import socket; socket.create_connection(('{address}', {port})).sendall(b'ping')"


@pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces: {why_not()}")
def test_two_hosts_reach_each_other_and_nothing_is_left_of_them() -> None:
    with two_hosts(100) as (first, second):
        answer = ANSWER.format(address=first.address)
        command = first.command(sys.executable, "-c", answer)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())
            call = CALL.format(address=first.address, port=port)
            subprocess.run(second.command(sys.executable, "-c", call), check=True)
            assert server.stdout.read().strip() == "ping"
    assert (
        first.namespace
        not in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "ddp_fp16", "onebit", "local_sgd"])
def test_a_race_over_loopback(name: str, tmp_path: Path) -> None:
    result = race(name, [LOOPBACK, LOOPBACK], 2, tmp_path)
    assert not result.error
    assert result.seconds > 0
    assert result.num_bytes > 0
