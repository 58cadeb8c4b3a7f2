"""The small model under others' strategies, on processes: folders that they write, and read."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_shard import ZeRO3Strategy
from tests.checkpoint.sharded.runs import SAVED_AFTER, Model, quiet_trainer


class Peer(Model):
    """The model without a scalar parameter, which FSDP cannot shard, and with a `forward`."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.5
        self.embed.bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, 4) to (N, 1)."""
        return self.head(self.blocks(self.embed(x)))


class ShardedPeer(Peer):
    """The model as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        """Apply FSDP2, once."""
        if not isinstance(self.embed, FSDPLayer):
            shard_layers(self, self.device_mesh["data_parallel"])


FSDPLayer = torch.distributed.fsdp.FSDPModule


def shard_layers(model: Peer, mesh: Any) -> None:
    """Apply FSDP2 to the layers."""
    for layer in (model.embed, *model.blocks, model.head):
        fully_shard(layer, mesh=mesh)


def peer(kind: type[Peer] = Peer) -> Peer:
    """Return the model with the values that every test begins from."""
    torch.manual_seed(0)
    return kind()


def model_parallel(folder: Path, resume: Path | None = None) -> list[float]:
    """Train under Lightning's `ModelParallelStrategy`, which writes `folder/step=2.ckpt`."""
    warnings.simplefilter("ignore")  # theirs
    model = peer(ShardedPeer)
    writer = ModelCheckpoint(
        folder,
        "{step}",
        every_n_train_steps=SAVED_AFTER,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = quiet_trainer(strategy, devices=2, callbacks=[writer], enable_checkpointing=True)
    trainer.fit(model, ckpt_path=resume)
    return model.losses


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam that has updated the model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(SAVED_AFTER):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return optimizer


def write_fsdp2(folder: Path) -> None:
    """Write a folder as a loop around FSDP2 does, without anything of Lightning's."""
    warnings.simplefilter("ignore")  # theirs
    dist.init_process_group("gloo")
    model = peer()
    shard_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = stepped(model)
    state = {
        "state_dict": get_model_state_dict(model),
        "optimizer_0": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def write_fsdp1(folder: Path) -> None:
    """Write a folder in the layout of Lightning's `FSDPStrategy`, which refuses CPUs itself."""
    warnings.simplefilter("ignore")  # theirs
    dist.init_process_group("gloo")
    fsdp = FullyShardedDataParallel
    model = fsdp(
        peer(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = stepped(model)
    kind = StateDictType.SHARDED_STATE_DICT
    with fsdp.state_dict_type(model, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
        state = {
            "model": model.state_dict(),
            "optimizer_0": fsdp.optim_state_dict(model, optimizer),
        }
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def read_fsdp2(path: Path) -> dict[str, Tensor]:
    """Read a folder into FSDP2's parameters as a loop around it does; return them full."""
    warnings.simplefilter("ignore")  # theirs
    dist.init_process_group("gloo")
    model = peer()
    shard_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"state_dict": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["state_dict"])
    full = {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
        for name, param in model.named_parameters()
    }
    dist.destroy_process_group()
    return full


def gloo(folder: Path, resume: Path | None = None) -> list[float]:
    """Train under this package on processes, which write `folder/step=2.ckpt`."""
    warnings.simplefilter("ignore")
    model = peer()
    writer = ModelCheckpoint(
        folder,
        "{step}",
        every_n_train_steps=SAVED_AFTER,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    strategy = ZeRO3Strategy(backend="gloo", announce=False, checkpoint_format="sharded")
    trainer = quiet_trainer(strategy, devices=2, callbacks=[writer], enable_checkpointing=True)
    trainer.fit(model, ckpt_path=resume)
    trainer.save_checkpoint(folder / "afterwards.ckpt")
    return model.losses
