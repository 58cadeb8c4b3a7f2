"""Hooks of optimizers and functions of schedulers compute with weights as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_shard.errors import ConfigError
from tests.strategies.decoders import (
    DECODER_SCHEMES,
    WITHOUT_STAGES,
    Decoder,
    assert_as_alone,
    fit_decoder,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit, trainer_of

pytestmark = ignoring(
    ".*microbatches are fewer than the", "A step uses .* parameters outside of their stage"
)
SCHEMES = [*WITHOUT_STAGES, "pipeline", "2x2x2"]


class Hooked(Decoder):
    """What hooks do to weights goes by a number of all of them, which is wrong of a part."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        return optimizer

    @torch.no_grad()
    def shrink(self, *others: Tensor) -> None:
        norms = sum((*(one.norm() for one in self.parameters()), *others))
        for param in self.parameters():
            param.mul_(1 - 0.001 * norms)

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        self.shrink()

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        self.shrink(*(one.grad.norm() for one in self.parameters() if one.grad is not None))


class OfEarlierGradients(Hooked):
    """Lightning's backward comes after a hook before the step, which has the last one's."""

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        self.shrink(*(one.grad.norm() for one in self.parameters() if one.grad is not None))

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for layer in (one for one in self.modules() if isinstance(one, nn.Linear)):
                layer.weight.div_(layer.weight.norm(dim=1, keepdim=True).clamp(min=0.8))


class ByHand(Hooked):
    """Without a closure, gradients are there before the step, and may be edited."""

    def build(self) -> None:
        self.automatic_optimization = False

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            norms = sum(one.grad.norm() for one in self.parameters())  # type: ignore[union-attr]
            for param in self.parameters():
                param.grad.mul_(1 / (1 + norms)).add_(param, alpha=0.1)  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class OfAllOptimizers(Hooked):
    """The hook is torch's of all optimizers, and is there from the middle of the fit."""

    def configure_optimizers(self) -> Any:
        return Decoder.configure_optimizers(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            own = self.trainer.optimizers[0]
            self.handle = register_optimizer_step_post_hook(
                lambda one, *_: self.after(one) if one is own else None
            )

    def on_fit_end(self) -> None:
        self.handle.remove()


class OfSchedules(Decoder):
    """The learning rate goes by the weights."""

    def rate(self, *_: Any) -> float:
        return 1 / (1 + sum(float(one.detach().norm()) for one in self.parameters()))

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, self.rate)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = {"scheduler": self.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class OwnSchedule(LRScheduler):
    def __init__(self, optimizer: Optimizer, rate: Callable[[], float]) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [0.1 * self.rate() for _ in self.optimizer.param_groups]


class OfOwnSchedules(OfSchedules):
    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        return OwnSchedule(optimizer, self.rate)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "style", [Hooked, OfEarlierGradients, OfAllOptimizers, OfSchedules, OfOwnSchedules]
)
def test_hooks_of_optimizers_see_full_weights(style: type[Decoder], scheme: str) -> None:
    """Norms in an optimizer's hooks were those of parts; functions of schedules saw parts, too."""
    assert_as_alone(style, scheme)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
def test_a_hook_edits_gradients_of_steps_by_hand(scheme: str) -> None:
    """What a hook of an optimizer did with gradients, it did with parts."""
    assert_as_alone(ByHand, scheme)


class Inherited(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OfABaseClass(Hooked):
    def configure_optimizers(self) -> Any:
        SGD([nn.Parameter(torch.ones(1))])  # torch calls hooks around the base class's step now
        optimizer = Inherited(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.after)
        return optimizer


def test_hooks_in_the_middle_of_a_step_are_refused() -> None:
    """Hooks around the step of a base class saw parts of weights."""
    with pytest.raises(ConfigError, match=r"Inherited calls that of its base class.*shard_ddp"):
        fit_decoder(OfABaseClass, "zero2")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_hooks_of_an_optimizer_are_there_after_a_resume(tmp_path: Any) -> None:
    path = str(tmp_path / "last.ckpt")
    fit_decoder(Hooked, "zero2", max_epochs=1).trainer.save_checkpoint(path)
    model = Hooked()
    num_ranks, make = DECODER_SCHEMES["zero3"]
    trainer_of(make(), devices=num_ranks).fit(model, ckpt_path=path)
    torch.testing.assert_close(dict(model.state_dict()), fit(Hooked).weights, rtol=1e-9, atol=1e-9)
