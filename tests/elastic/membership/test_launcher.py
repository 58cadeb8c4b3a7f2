"""The ranks of an elastic job as processes: none takes the others along."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_shard.core import settings
from lightning_shard.core.settings import Job
from lightning_shard.elastic.membership import launcher as launcher_module
from lightning_shard.elastic.membership.launcher import ElasticLauncher
from lightning_shard.elastic.membership.rendezvous_server import JobRules
from lightning_shard.environments.elastic import ElasticEnvironment
from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.errors import ConfigError
from tests.elastic.rendezvous_servers import wait_until
from tests.patience import patient
from tests.processes import REPOSITORY

RULES = JobRules(initial_size=2)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been started: servers as (host, port, token), children as commands."""
    for name in ("JOB", "JOB_TOKEN", "JOB_IS_INITIAL"):
        monkeypatch.setenv(f"LIGHTNING_SHARD_{name}", "")  # put back what the launcher sets
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    calls: list[Any] = []

    def start_rendezvous_server(rules: JobRules, host: str, port: int, token: str) -> Job:
        calls.append((host, port, token))
        return Job(host=host, port=port or 1234, token=token or "of this user on this host")

    monkeypatch.setattr(launcher_module, "start_rendezvous_server", start_rendezvous_server)
    return calls


class Child:
    """A process that only hears signals."""

    args = ("python", "train.py")

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)


def launch(num_ranks: int, num_nodes: int = 1, rules: JobRules = RULES) -> ElasticLauncher:
    environment = ElasticEnvironment(LightningEnvironment())
    launcher = ElasticLauncher(environment, num_ranks, num_nodes, rules)
    assert launcher.launch(lambda: "result") == "result"
    return launcher


def test_the_main_process_starts_a_server_and_says_how_to_join(
    started: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    launch(1)
    [(host, port, token)] = started
    assert (host, port, token) == ("127.0.0.1", 0, "")
    assert settings.job() == Job(host="127.0.0.1", port=1234, token="of this user on this host")
    assert not settings.joins_job()
    said = capfd.readouterr().err
    assert "To add a rank: LIGHTNING_SHARD_JOB=127.0.0.1:1234 " in said
    assert "TOKEN" not in said


@pytest.mark.usefixtures("started")
def test_a_module_that_begins_alone_is_joined_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command named the module's file, which does not find the package that it is in."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "package.module", "--ranks", "1"])
    launch(1)
    assert f" {sys.executable} -m package.module --ranks 1\n" in capfd.readouterr().err


def test_children_and_newcomers_start_nothing(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", "127.0.0.1:1")
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "token of the tests")
    newcomer = launch(4)  # as many as the script says
    assert newcomer.cluster_environment.creates_processes_externally
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_IS_INITIAL", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    launch(2)
    assert started == []


def test_ranks_that_a_scheduler_has_started_meet_at_the_main_address(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    launch(1)
    first = settings.job()
    assert first is not None
    assert started == [("127.0.0.1", 29500, first.token)]
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", "")
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "a token of my own")
    launch(1)
    assert started[1:] == [("node-1", 29500, "a token of my own")]


def test_sigterm_is_for_one_rank_and_a_kill_for_all(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    child: Any = Child()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: child)
    launcher = launch(2)
    assert launcher.procs == []  # for Lightning's observer, which ends all with the first
    launcher.kill(signal.SIGTERM)
    assert child.signals == []
    launcher.kill(signal.SIGKILL)
    assert child.signals == [signal.SIGKILL]


@pytest.fixture
def static_group() -> Iterator[None]:
    """The process group of an earlier run, which was not elastic."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("static_group")
def test_after_a_run_of_ranks_that_stay_the_server_takes_a_free_port_and_children_may_end(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")  # at which the ranks of that run have met
    children: list[Any] = [Child()]
    monkeypatch.setattr(ProcessLauncher, "watched", children)
    launcher = launch(1, rules=JobRules(initial_size=1))
    assert started == [("127.0.0.1", 0, "")]
    assert settings.job() == Job(host="127.0.0.1", port=1234, token="of this user on this host")
    [child] = launcher._children
    assert isinstance(child, Child)
    assert children == []  # Lightning's observer looks at this list


@pytest.mark.usefixtures("static_group")
def test_more_ranks_than_have_met_before_are_refused(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="Rank 0 of 1: this Trainer would make it rank 0 of 2"):
        launch(2)
    assert started == []


def test_nobody_joins_a_run_of_ranks_that_stay(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started ranks of its own, beside the job that it was to join."""
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", "127.0.0.1:1")
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "token of the tests")
    launcher = ProcessLauncher(LightningEnvironment(), 2, 1)
    with pytest.raises(ConfigError, match="a run of its script is not elastic"):
        launcher.launch(lambda: None)
    assert started == []


@pytest.mark.slow
def test_the_others_survive_the_main_process_and_a_newcomer_joins_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.elastic.program", str(tmp_path), "3"]
    said = tmp_path / "said"
    with said.open("w") as errors:
        main = subprocess.Popen(command, cwd=REPOSITORY, stderr=errors)

    def generations() -> dict[str, list[str]]:
        logs = [path for path in tmp_path.iterdir() if path.name.isdecimal()]
        lines = {path.name: path.read_text().splitlines() for path in logs}
        return {name: [one for one in of if "/" in one] for name, of in lines.items()}

    def stands(place: str, times: int) -> bool:
        """Whether so many ranks are in this generation: "number size"."""
        number, size = place.split()
        lines = [line for of in generations().values() for line in of]
        return sum(bool(re.fullmatch(rf"{number} \d/{size}", line)) for line in lines) == times

    newcomer = None
    try:
        wait_until(lambda: stands("1 3", 3))
        main.kill()
        main.wait()
        wait_until(lambda: stands("2 2", 2))
        [invitation] = re.findall("To add a rank: (.*)", said.read_text())
        newcomer = subprocess.Popen(["env", *shlex.split(invitation)], cwd=REPOSITORY)
        wait_until(lambda: stands("3 3", 3))
        (tmp_path / "end").touch()
        assert newcomer.wait(patient(60)) == 0
        others = [name for name in generations() if name != str(main.pid)]
        wait_until(lambda: all("end" in (tmp_path / name).read_text() for name in others))
    finally:
        (tmp_path / "end").touch()
        main.kill()
        main.wait()
        if newcomer is not None:
            newcomer.kill()
            newcomer.wait()
