"""Hooks of validate, test and predict see and edit full weights, as those of a fit do."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.strategies.parity import ignoring
from tests.strategies.schemes import SCHEMES
from tests.strategies.stacks import BATCH, Stack, trainer_of

pytestmark = ignoring("Using `DistributedSampler` with the dataloaders")


class Halved(Stack):
    """Evaluates with half of its weights, and puts back what it has kept of them."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, list[float], list[torch.Size]]] = []

    def look(self, hook: str) -> None:
        params = list(self.parameters())
        norms = [float(p.detach().norm()) for p in params]
        self.read.append((hook, norms, [p.shape for p in params]))

    @torch.no_grad()
    def on_validation_start(self) -> None:
        self.look("start")
        self.kept = [p.detach().clone() for p in self.parameters()]
        for p in self.parameters():
            p.mul_(0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.look("batch end")

    @torch.no_grad()
    def on_validation_end(self) -> None:
        self.look("end")
        for p, kept in zip(self.parameters(), self.kept, strict=True):
            p.copy_(kept)
        self.head.weight[0].zero_()

    def val_dataloader(self) -> Any:
        num_ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        return DataLoader(self.dataset(), batch_size=BATCH // num_ranks)


def evaluated(strategy: Any, num_ranks: int) -> tuple[float, dict[str, Any], Any]:
    torch.manual_seed(3)
    module = Halved()
    trainer = trainer_of(strategy, devices=num_ranks, use_distributed_sampler=True)
    loss = trainer.validate(module, verbose=False)[0]["loss"]
    return loss, module.state_dict(), module.read


@pytest.mark.parametrize("scheme", ["zero3", "tensor", "pipeline", "zero2"])
def test_hooks_of_an_evaluation_saw_shards(scheme: str) -> None:
    """Under zero3 a weight had the shape and the norm of its shard."""
    num_ranks, make = SCHEMES[scheme]
    loss, weights, read = evaluated("auto", 1)
    its_loss, its_weights, its_read = evaluated(make(), num_ranks)
    assert its_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(its_weights, weights, rtol=1e-5, atol=2e-7)
    for (hook, norms, shapes), (its_hook, its_norms, its_shapes) in zip(
        read, its_read, strict=True
    ):
        assert (its_hook, its_shapes) == (hook, shapes)
        assert its_norms == pytest.approx(norms, rel=1e-5)
