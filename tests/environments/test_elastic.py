"""Who a process is in an elastic job."""

from collections.abc import Iterator

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.core import settings
from lightning_shard.environments.checks import check_environment
from lightning_shard.environments.elastic import ElasticEnvironment, elastic_environment
from lightning_shard.errors import ConfigError


@pytest.fixture(autouse=True)
def rank_of_logging() -> Iterator[None]:
    before = getattr(rank_zero_only, "rank", None)
    yield
    setattr(rank_zero_only, "rank", before)  # noqa: B010


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> ElasticEnvironment:
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", "node-1:1234")
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "token of the tests")
    monkeypatch.delenv("LIGHTNING_SHARD_JOB_IS_INITIAL", raising=False)
    return ElasticEnvironment(LightningEnvironment())


def test_an_initial_rank_is_what_its_environment_says_until_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    environment = ElasticEnvironment(LightningEnvironment())
    assert environment.creates_processes_externally
    environment.set_global_rank(2)
    environment.set_world_size(4)
    assert (environment.global_rank(), environment.world_size()) == (2, 4)
    environment.admit(1, 3)
    environment.set_global_rank(2)
    environment.set_world_size(4)
    assert (environment.global_rank(), environment.world_size()) == (1, 3)
    assert rank_zero_only.rank == 1
    assert (environment.local_rank(), environment.node_rank()) == (2, 0)


def test_the_main_process_starts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LIGHTNING_SHARD_JOB", raising=False)
    assert not ElasticEnvironment(LightningEnvironment()).creates_processes_externally


def test_a_newcomer_is_no_rank_zero_and_starts_nobody(newcomer: ElasticEnvironment) -> None:
    assert newcomer.is_newcomer
    assert newcomer.creates_processes_externally
    assert newcomer.global_rank() > 0
    assert rank_zero_only.rank > 0
    newcomer.set_global_rank(0)
    newcomer.set_world_size(4)
    assert newcomer.global_rank() > 0
    assert (newcomer.main_address, newcomer.main_port) == ("node-1", 1234)
    check_environment(newcomer, num_devices=4, num_nodes=7)
    newcomer.admit(0, 1)
    assert (newcomer.global_rank(), newcomer.world_size()) == (0, 1)


def test_the_variables_of_an_initial_rank_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    environment = ElasticEnvironment(LightningEnvironment())
    with pytest.raises(ConfigError, match="LOCAL_RANK is 4, expected 0 to 3"):
        check_environment(environment, num_devices=4, num_nodes=1)


def test_torchrun_says_itself_who_takes_part() -> None:
    found = TorchElasticEnvironment()
    assert elastic_environment(found) is found
    made = elastic_environment(LightningEnvironment())
    assert isinstance(made, ElasticEnvironment)
    assert elastic_environment(made) is made


@pytest.mark.parametrize("address", ["1234", ":1234", "host:", "host:x", "host:0", "host:99999"])
def test_a_job_that_is_no_address_is_an_error(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", address)
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "token of the tests")
    with pytest.raises(ConfigError, match=r"LIGHTNING_SHARD_JOB is .*expected host:port"):
        settings.job()


def test_a_short_token_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SHARD_JOB", "host:1")
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "token")
    with pytest.raises(ConfigError, match="JOB_TOKEN holds 5 characters; expected a secret of 16"):
        settings.job()


def test_a_rank_outside_its_generation_is_an_error(newcomer: ElasticEnvironment) -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        newcomer.admit(2, 2)
    with pytest.raises(ConfigError, match="rank -1 of 2"):
        newcomer.admit(-1, 2)


def test_what_a_newcomer_is_told_is_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for job in (
        settings.Job(host="node-1", port=1, token="first token of a test"),
        settings.Job(host="::1", port=65535, token="second token of a test"),
    ):
        for name, value in settings.job_variables(job).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", job.token)
        assert settings.job() == job
