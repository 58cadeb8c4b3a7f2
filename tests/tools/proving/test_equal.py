"""No false alarm: modules that train right under a strategy are equal, to rounding."""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy, prove
from tests.strategies.models import MODELS, PIPELINE_MODELS, SPLIT_MODELS
from tests.tools.proving.more_planted import Plateau
from tests.tools.proving.planted import WIDTH, BatchNormed, IgnoresClasses, Net, loader

ALL = MODELS | SPLIT_MODELS | PIPELINE_MODELS
STRATEGIES: dict[str, tuple[Any, int]] = {
    "shard_ddp": ("shard_ddp", 2),
    "zero1": ("zero1", 3),
    "zero2": ("zero2", 2),
    "zero3": ("zero3", 2),
    "elastic": ("elastic", 2),
    "tensor_parallel": ("tensor_parallel", 2),
    "pipeline_parallel": (lambda: PipelineParallelStrategy(num_microbatches=2), 2),
    "hybrid_parallel": (
        lambda: HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=2),
        4,
    ),
}
QUICK = [("gpt", name) for name in STRATEGIES]
# conv has batch norms, of whose statistics each rank has its own: it differs
MODELS_TRIED = (
    "sync_conv",
    "lstm",
    "llama",
    "gpt2",
    "mixture",
    "encoder",
    "bert",
    "vit",
    "mixtral",
)
REFUSED = {
    ("lstm", "pipeline_parallel"): "no list of repeated blocks",
    ("lstm", "hybrid_parallel"): "no list of repeated blocks",
    ("sync_conv", "tensor_parallel"): "found nothing in ConvNet to split",
    ("mixture", "tensor_parallel"): "found nothing in Mixture to split",
    ("sync_conv", "pipeline_parallel"): "name the one to cut: blocks='body'",
    ("sync_conv", "hybrid_parallel"): "name the one to cut: blocks='body'",
}


def _check(name: str, strategy: str) -> None:
    torch.manual_seed(7)
    model = ALL[name]()
    made, num_ranks = STRATEGIES[strategy]
    options = {
        "gradient_clip_val": 0.1,
        "accumulate_grad_batches": 2,
        "sync_batchnorm": name == "sync_conv",
    }
    data = DataLoader(model.data(48), batch_size=4, shuffle=True)
    verdict = prove(
        model, data, strategy=made, num_ranks=num_ranks, num_steps=2, trainer_options=options
    )
    refused = REFUSED.get((name, strategy))
    assert verdict.outcome == ("refused" if refused else "equal"), str(verdict)
    assert (refused or "") in verdict.error
    assert verdict.exit_status == (2 if refused else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), QUICK)
def test_the_example_gpt(name: str, strategy: str) -> None:
    _check(name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS_TRIED)
def test_other_models(name: str, strategy: str) -> None:
    _check(name, strategy)


class Manual(Net):
    """Two optimizers, in the style of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, network in zip(self.optimizers(), (self, self.critic), strict=True):
            loss = F.mse_loss(network(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        net = [*self.body.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(net, 0.01), torch.optim.SGD(self.critic.parameters(), 0.1)]


class MeanOfAll(IgnoresClasses):
    """The advice for unequal counts, followed."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        errors = F.cross_entropy(self(batch[0]), batch[2], ignore_index=-100, reduction="sum")
        count = (batch[2] != -100).sum().to(errors)
        return errors / self.trainer.strategy.reduce(count, reduce_op="mean")


class Averaged(Net):
    """Keeps an average of its weights in a buffer, and logs for the epoch over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.average.lerp_(self.head.weight[0].detach().to(self.average), 0.1)


class Stream(IterableDataset):
    """Batches without a length, of which each rank takes every other one."""

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        for number, batch in enumerate(loader()):
            if number % num_ranks == rank:
                yield batch


GOOD: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "plain": (Net, loader, {}),
    "manual optimization": (Manual, loader, {}),
    "mean over all ranks": (MeanOfAll, loader, {}),
    "averaged weights": (Averaged, loader, {}),
    "synchronised batch norm": (BatchNormed, loader, {"sync_batchnorm": True}),
    "rates by a loss that is not synchronised": (Plateau, loader, {}),
    "stream": (Net, lambda: DataLoader(Stream(), batch_size=None), {}),
    "accumulation": (Net, loader, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01}),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_a_module_that_is_right(name: str, strategy: str) -> None:
    module, data, options = GOOD[name]
    verdict = prove(module(), data(), strategy=strategy, trainer_options=options)
    assert verdict.outcome == "equal", str(verdict)
    assert verdict.cause is None
