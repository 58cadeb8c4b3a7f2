"""The names that Fabric knows, of both roots, and strategies of the wrong one."""

from typing import Any

import lightning as L  # noqa: N812
import lightning.fabric
import lightning_fabric
import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import Strategy

import lightning_shard
from lightning_shard import fabric as ours
from lightning_shard.backends.registry import backend_names
from lightning_shard.core.schemes import SCHEMES
from lightning_shard.errors import ConfigError
from lightning_shard.fabric.registry import SERVED
from lightning_shard.on_pytorch_lightning import fabric as mirrored
from tests.fabric.nets import Net, adam, assert_close, on_one, weights_of
from tests.fabric.test_ranks import fitted


@pytest.mark.parametrize("root", [lightning.fabric, lightning_fabric])
def test_every_name_is_known(root: Any) -> None:
    registry = root.strategies.STRATEGY_REGISTRY
    suffixes = ["", *(f"_{name}" for name in backend_names())]
    assert {f"{scheme}{end}" for scheme in SCHEMES for end in suffixes} <= set(registry)
    assert {"shard_ddp_int8", "shard_ddp_powersgd_in_process", "zero3_offload"} <= set(registry)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in SERVED])
@pytest.mark.parametrize("end", ["", "_in_process"])
def test_other_schemes_are_refused_by_name(scheme: str, end: str) -> None:
    with pytest.raises(ConfigError, match=f"'{scheme}{end}'.*works with a Trainer only.*use '"):
        Fabric(strategy=f"{scheme}{end}", accelerator="cpu")


def test_names_make_strategies_with_their_options() -> None:
    made = Fabric(strategy="shard_ddp_int8_in_process", accelerator="cpu", devices=2).strategy
    assert isinstance(made, ours.DDPStrategy)
    assert isinstance(made, Strategy)
    assert made.is_in_process
    assert type(Fabric(strategy="shard_fsdp", accelerator="cpu").strategy) is ours.ZeRO3Strategy


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bucket_mb'"):
        ours.ZeRO2Strategy(bucket_md=3)
    with pytest.raises(ConfigError, match="checkpoint_format must be 'full' or 'sharded'"):
        ours.ZeRO2Strategy(checkpoint_format="half")
    strategy = ours.ZeRO2Strategy(backend="in_process", num_ranks=3)
    with pytest.raises(ConfigError, match=r"num_ranks=3 and Fabric\(devices=2\) contradict"):
        Fabric(strategy=strategy, accelerator="cpu", devices=2)
    with pytest.raises(ConfigError, match="got num_nodes=2"):
        Fabric(strategy="zero2_in_process", accelerator="cpu", devices=2, num_nodes=2)


def test_precisions_that_do_not_work_on_shards_are_refused() -> None:
    class Own(Precision):
        pass

    with pytest.raises(ConfigError, match="Own does not work on sharded models"):
        Fabric(strategy="zero2_in_process", accelerator="cpu", plugins=Own())


def test_strategies_of_another_runner_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one of lightning_shard\.fabric"):
        Fabric(strategy=lightning_shard.ZeRO3Strategy(), accelerator="cpu")
    with pytest.raises(
        ConfigError, match="Pass the name of one that is there"
    ):  # nothing to import
        Fabric(strategy=lightning_shard.PipelineParallelStrategy(), accelerator="cpu")
    with pytest.raises(ConfigError, match=r"lightning_shard\.on_pytorch_lightning\.fabric"):
        lightning_fabric.Fabric(strategy=ours.ZeRO3Strategy(), accelerator="cpu")
    with pytest.raises(ConfigError, match=r"expected lightning_shard\.ZeRO3Strategy"):
        L.Trainer(strategy=ours.ZeRO3Strategy(), accelerator="cpu", logger=False)


def test_ranks_are_launched_before_they_are_used() -> None:
    with pytest.raises(ConfigError, match=r"Call fabric\.launch\(\) first"):
        Fabric(strategy="zero2_in_process", accelerator="cpu").strategy.broadcast(1)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_the_other_root_trains_the_same(stage: str) -> None:
    fabric = lightning_fabric.Fabric(strategy=f"{stage}_in_process", accelerator="cpu", devices=2)
    assert isinstance(fabric.strategy, mirrored.FabricStrategy)
    module, expected = Net(), Net()
    fabric.launch(fitted, module, adam(module))
    on_one(fitted, expected, adam(expected))
    assert_close(weights_of(module), weights_of(expected))


def test_the_private_names_of_fabric_are_there() -> None:
    assert lightning.fabric.connector._Connector._check_config_and_set_final_flags is not None
