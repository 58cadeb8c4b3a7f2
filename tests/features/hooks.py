"""The hooks of a module, and what users write in them."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.features.columns import OF_OTHER_SAMPLES, PIPELINES, Here
from tests.features.declared import add, by, feature
from tests.features.network import Block, Loaders, Network, Report, fitted, left_by

GROUP = "Hooks of a module"


class _Stepping(Network):
    """Hooks around the step of the optimizer: a warm-up by hand, gradients set to zero."""

    def optimizer_step(self, epoch: int, idx: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 4)
        super().optimizer_step(epoch, idx, optimizer, closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class _Clipping(Network):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class _Backward(Network):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward(*args, **kwargs)


class _Dictionary(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "extra": batch[0].mean()}


class _Skipping(Network):
    """Leaves out every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 else loss


class _Ending(Network):
    """Ends an epoch after its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class _Doubling(Network):
    """Changes batches after they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.5, batch[1]]


class _Late(Network):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.backbone, self.head

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        torch.manual_seed(7)
        self.backbone = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(8, 2)


class _Setup(_Late):
    """Makes its layers in `setup`."""

    def configure_model(self) -> None:
        """Leave it to `setup`."""

    def setup(self, stage: str) -> None:
        _Late.configure_model(self)


class _Norm(Network):
    """Logs the norms of all gradients, as Lightning's documentation does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class _Teacher(Network):
    """Keeps a momentum teacher, with assignments to `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 2)
        self.teacher.load_state_dict(self.head.state_dict())
        self.teacher.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            old.data = old.data * 0.5 + new.data * 0.5


class _Gathering(Network):
    """Computes its loss over the samples of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.all_gather(self(batch[0]), sync_grads=True).flatten(0, -2)
        targets = self.all_gather(batch[1]).flatten(0, -2)
        loss = (outputs - targets).square().mean() + outputs.mean(0).square().sum()
        self.log("loss", loss, sync_dist=True)
        return loss


class _Restoring(Network):
    """Trains in eval mode, computes a target without gradients first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.head(batch[0])
        loss = self.loss([batch[0], batch[1] + 0.1 * target])
        self.log("loss", loss, sync_dist=True)
        return loss


class _Penalised(Network):
    """Adds a penalty over the parameters to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * sum(param.square().sum() for param in self.parameters())


class _Checkpointed(Network):
    """Computes each block's activations again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.backbone:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class _Epochs(Network):
    """Averages the losses of an epoch by itself."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("own_mean", torch.stack(self.losses).mean(), sync_dist=True)


class _Frozen(Network):
    """Thaws its backbone in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Counting(Network):
    """Has a buffer that counts, and a list of everything it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


MODULES: dict[str, tuple[type[Network], dict[str, Any]]] = {
    "optimizer_step, optimizer_zero_grad": (_Stepping, {}),
    "configure_gradient_clipping": (_Clipping, {"own": ("local_sgd",)}),
    "backward": (_Backward, {}),
    "training_step that returns a dictionary": (_Dictionary, {}),
    "training_step that returns None": (
        _Skipping,
        {"refused": by(OF_OTHER_SAMPLES, "Skipping the `training_step` by returning None")},
    ),
    "on_train_batch_start that returns -1": (_Ending, {}),
    "on_after_batch_transfer": (_Doubling, {}),
    "configure_model": (_Late, {}),
    "layers made in setup": (_Setup, {}),
    "grad_norm": (_Norm, {"own": ("local_sgd",)}),
    "a momentum teacher": (_Teacher, {}),
    # A pipeline's step sees a microbatch.
    "all_gather(sync_grads=True)": (_Gathering, {"refused": by(PIPELINES, "num_microbatches=1")}),
    "a target without gradients": (_Restoring, {}),
    "a penalty over the parameters": (_Penalised, {}),
    "activation checkpointing": (_Checkpointed, {}),
    "a mean over an epoch by hand": (_Epochs, {}),
    "parameters thawed in the second epoch": (_Frozen, {}),
    "buffers that a hook changes": (_Counting, {}),
}


def _module(make: Any, here: Here) -> Report:
    return fitted(here, make())


for _title, (_class, _expected) in MODULES.items():
    add(GROUP, _title, partial(_module, _class), **_expected)


@feature(GROUP, "layers in evaluation mode")
def evaluation_mode(here: Here) -> Report:
    module = Network()
    module.backbone.eval()
    trainer = here.trainer()
    trainer.fit(module, datamodule=Loaders(here))
    return left_by(trainer, module) | {"training": module.backbone.training}


@feature(GROUP, "freeze, unfreeze")
def freeze(here: Here) -> Report:
    module = Network()
    module.freeze()
    module.unfreeze()
    module.head.requires_grad_(False)
    return fitted(here, module)
