"""A small module with its data, and what a fit of it leaves to be compared."""

from collections import Counter
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.features.columns import GLOBAL_BATCH, Here

Report = dict[str, Any]
WIDTH = 8
NUM_TRAINING, NUM_VALIDATION = 4, 2  # global batches


class Block(nn.Module):
    """Two layers beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Network(L.LightningModule):
    """Four blocks and a head, trained by SGD with momentum; the same values every time."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.backbone = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=self.hparams.lr, momentum=0.9)


def dataset(num_samples: int, seed: int = 1) -> TensorDataset:
    """Return inputs and targets which a small network can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return TensorDataset(x, torch.stack([x.sin().mean(1), x.square().mean(1)], dim=1))


def loader(here: Here, num_batches: int, seed: int = 1, **options: Any) -> DataLoader:
    """Return so many global batches; the Trainer assigns those of validation to the ranks."""
    full = dataset(num_batches * GLOBAL_BATCH, seed)
    return DataLoader(full, batch_size=here.column.batch_size, **options)


def assigned(here: Here, trainer: L.Trainer | None, num_batches: int, seed: int = 1) -> DataLoader:
    """Return global batches in their order, which the Trainer would shuffle."""
    assert trainer is not None
    place = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    full = loader(here, num_batches, seed).dataset
    sampler = DistributedSampler(full, **place, shuffle=False)
    return DataLoader(full, batch_size=here.column.batch_size, sampler=sampler)


class Loaders(L.LightningDataModule):
    """Batches of training, validation, test and prediction."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def train_dataloader(self) -> Any:
        return assigned(self.here, self.trainer, NUM_TRAINING)

    def val_dataloader(self) -> Any:
        return loader(self.here, NUM_VALIDATION, seed=2)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class Hooks(Callback):
    """Counts the hooks that rank 0 sees."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen["batches"] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seen["steps"] += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seen["epochs"] += 1

    def on_validation_batch_end(self, *_: Any) -> None:
        self.seen["validated batches"] += 1

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.seen["validations"] += 1


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state of a module that is full."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fitted(
    here: Here,
    module: Network | None = None,
    data: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Report:
    """Fit, and return the weights, what was logged, and how often hooks were called."""
    module = Network() if module is None else module
    hooks = Hooks()
    options["callbacks"] = [*options.get("callbacks", []), hooks]
    if "barebones" in options:
        del options["callbacks"]
    trainer = here.trainer(**options)
    trainer.fit(module, datamodule=Loaders(here) if data is None else data, ckpt_path=ckpt_path)
    return left_by(trainer, module) | {"hooks": dict(hooks.seen)}


def left_by(trainer: L.Trainer, module: nn.Module) -> Report:
    """Return the weights, what was logged, and how far the Trainer has come."""
    return {
        "weights": weights(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stopped": trainer.should_stop,
    }


class WithRate(Network):
    """Its learning rate is an attribute, which a finder may set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class CountsBatches(Callback):
    """Has a state, which is in checkpoints."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]
