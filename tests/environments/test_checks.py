"""Every wrong set of variables is an error that names the variable, before anything starts."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_shard import ZeRO2Strategy
from lightning_shard.environments.checks import check_environment
from lightning_shard.errors import ConfigError
from tests.environments.variables import LIGHTNING, SLURM, TORCHRUN, set_only

LAUNCHERS: dict[str, tuple[type[Any], dict[str, str]]] = {
    "torchrun": (TorchElasticEnvironment, TORCHRUN),
    "srun": (SLURMEnvironment, SLURM),
    "lightning": (LightningEnvironment, LIGHTNING),
}
NUMBERS = [
    *[
        ("torchrun", name)
        for name in TORCHRUN
        if name not in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR")
    ],
    *[("srun", name) for name in SLURM if name not in ("SLURM_JOB_NAME", "SLURM_NODELIST")],
    *[("lightning", name) for name in LIGHTNING if name != "MASTER_ADDR"],
]
REQUIRED = [
    *[("torchrun", name) for name in TORCHRUN if name != "TORCHELASTIC_RUN_ID"],
    *[("srun", name) for name in SLURM if name not in ("SLURM_JOB_NAME", "SLURM_NTASKS_PER_NODE")],
    *[("lightning", name) for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")],
]


def check(launcher: str, devices: int = 2, num_nodes: int = 2) -> None:
    # Without the constructor, which reads some of the variables itself.
    environment = object.__new__(LAUNCHERS[launcher][0])
    check_environment(environment, devices, num_nodes)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_right_variables(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, LAUNCHERS[launcher][1])
    check(launcher)


@pytest.mark.parametrize(("launcher", "name"), NUMBERS)
def test_no_number(launcher: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, LAUNCHERS[launcher][1] | {name: "two"})
    with pytest.raises(ConfigError, match=f"variable {name} is 'two'; expected .* a whole number"):
        check(launcher)


@pytest.mark.parametrize(("launcher", "name"), REQUIRED)
def test_a_missing_variable(launcher: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, LAUNCHERS[launcher][1] | {name: None})
    with pytest.raises(ConfigError, match=f"variable {name} is not set; expected"):
        check(launcher)


@pytest.mark.parametrize(
    ("launcher", "changes", "message"),
    [
        ("torchrun", {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; expected 0 <= RANK < "),
        ("torchrun", {"RANK": "-1"}, "RANK is -1 and WORLD_SIZE is 4"),
        ("torchrun", {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        ("torchrun", {"GROUP_RANK": "2"}, "GROUP_RANK is 2 and GROUP_WORLD_SIZE is 2"),
        (
            "torchrun",
            {"LOCAL_WORLD_SIZE": "4"},
            r"torchrun started 4 rank\(s\) on this host \(LOCAL_WORLD_SIZE=4\), but "
            r"Trainer\(devices=2\): pass devices=4, or start `torchrun --nproc-per-node 2",
        ),
        (
            "torchrun",
            {"GROUP_WORLD_SIZE": "1"},
            r"on 1 host\(s\) \(GROUP_WORLD_SIZE=1\), but Trainer\(num_nodes=2\): pass num_nodes=1, "
            "or start `torchrun --nnodes 2",
        ),
        (
            "torchrun",
            {"WORLD_SIZE": "3"},
            r"WORLD_SIZE=3\), but .*devices=2, num_nodes=2\) makes 4",
        ),
        ("torchrun", {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; expected a port"),
        ("srun", {"SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and SLURM_NTASKS is 4"),
        ("srun", {"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2 and SLURM_NTASKS_PER_NODE is 2"),
        ("srun", {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 and SLURM_NNODES is 2"),
        (
            "srun",
            {"SLURM_NTASKS_PER_NODE": "4"},
            r"Rank 1: srun started 4 .*SLURM_NTASKS_PER_NODE=4\), but Trainer\(devices=2\): pass "
            "devices=4, or start `srun --ntasks-per-node=2 python",
        ),
        ("srun", {"SLURM_NNODES": "3"}, r"SLURM_NNODES=3\).*num_nodes=3, or start `srun --nodes=2"),
        ("srun", {"SLURM_NTASKS": "2"}, r"SLURM_NTASKS=2\), but .* makes 4"),
        (
            "srun",
            {"SLURM_NODELIST": "node[1-"},
            r"SLURM_NODELIST is 'node\[1-', .* Set MASTER_ADDR",
        ),
        ("srun", {"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        ("lightning", {"LOCAL_RANK": "2"}, r"LOCAL_RANK is 2, expected 0 to 1, as .*devices=2"),
        ("lightning", {"NODE_RANK": "2"}, r"NODE_RANK is 2, expected 0 to 1, as .*num_nodes=2"),
        ("lightning", {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, expected 4"),
        (
            "lightning",
            {"LOCAL_RANK": None, "RANK": "1"},
            "RANK=1 and WORLD_SIZE=4 .* LOCAL_RANK is not",
        ),
        ("lightning", {"SLURM_PROCID": "1"}, "SLURM_NTASKS is not set"),
        ("lightning", {"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT is 'tcp://10.0.0.1:80'"),
    ],
)
def test_a_contradiction(
    launcher: str, changes: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, LAUNCHERS[launcher][1] | changes)
    with pytest.raises(ConfigError, match=message):
        check(launcher)


def test_what_srun_leaves_out_for_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
    set_only(monkeypatch, SLURM | one | {"SLURM_NTASKS_PER_NODE": None, "SLURM_NODELIST": None})
    check("srun", 1, 1)


def test_an_address_of_the_users_stands_for_the_list_of_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
    set_only(monkeypatch, SLURM | own | {"SLURM_NODELIST": None, "SLURM_JOB_ID": None})
    check("srun")


def test_a_rank_that_numbers_hosts_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Kubernetes, with `NODE_RANK=$RANK`; Lightning starts each host's other ranks."""
    hosts = {"RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": None}
    set_only(monkeypatch, LIGHTNING | hosts)
    check("lightning", 2, 2)


def test_lightning_alone_needs_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {})
    check("lightning", 4, 1)


def test_a_wrong_port_of_a_single_host(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {"MASTER_PORT": "no"})
    with pytest.raises(ConfigError, match="MASTER_PORT is 'no'"):
        check("lightning", 1, 1)


def test_an_environment_of_the_users_checks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(TorchElasticEnvironment):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            raise RuntimeError(f"{num_devices} devices on {num_nodes} nodes")

    set_only(monkeypatch, {})
    with pytest.raises(RuntimeError, match="2 devices on 3 nodes"):
        check_environment(Own(), 2, 3)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        (SLURM | {"SLURM_NNODES": "1", "SLURM_NTASKS": "2"}, "SLURM_NNODES=1"),
        (LIGHTNING | {"NODE_RANK": "x"}, "NODE_RANK is 'x'"),
    ],
)
@pytest.mark.parametrize("strategy", ["zero2", "zero3_gloo"])
def test_the_trainer_refuses(
    strategy: str, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, variables)
    with pytest.raises(ConfigError, match=message):
        L.Trainer(strategy=strategy, accelerator="cpu", devices=2, num_nodes=2)


def test_a_strategy_refuses_what_lightning_would_stumble_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's SLURMEnvironment converts SLURM_NTASKS before it asks a strategy."""
    set_only(monkeypatch, SLURM | {"SLURM_NTASKS": "four"})
    with pytest.raises(ConfigError, match="SLURM_NTASKS is 'four'"):
        ZeRO2Strategy()


def test_in_process_ranks_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, LIGHTNING | {"LOCAL_RANK": "7", "MASTER_PORT": "no"})
    trainer = L.Trainer(strategy="zero2_in_process", accelerator="cpu", devices=3, logger=False)
    assert trainer.world_size == 3
