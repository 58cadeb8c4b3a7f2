"""Batches of any kind that a loader may give train under every scheme as on one device."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_shard import PipelineParallelStrategy, TensorParallelStrategy, ZeRO3Strategy
from lightning_shard.errors import ConfigError
from tests.strategies.parity import ignoring, quiet_trainer

WIDTH, BATCH = 4, 8
pytestmark = ignoring(
    "1 microbatches are fewer", "A batch has lists of samples", "The PyTorch API of nested tensors"
)


class OfPackage:
    """A batch of a class of its own, as packages of graphs have."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, *_: Any, **__: Any) -> "OfPackage":
        return self


def of_lengths(samples: list[Tensor]) -> list[Tensor]:
    """Return sequences of which each has a length of its own."""
    return [one.repeat(1 + number % 3, 1) for number, one in enumerate(samples)]


KINDS: dict[str, tuple[Callable[[list[Tensor]], Any], Callable[[Any], Tensor]]] = {
    "packed": (
        lambda samples: pack_sequence(of_lengths(samples), enforce_sorted=False),
        lambda batch: batch.data,
    ),
    "of a package": (lambda samples: OfPackage(torch.stack(samples)), lambda batch: batch.rows),
    "mapping proxy": (
        lambda samples: MappingProxyType({"x": torch.stack(samples)}),
        lambda batch: batch["x"],
    ),
    "sparse": (lambda samples: torch.stack(samples).to_sparse(), Tensor.to_dense),
    "nested": (torch.nested.nested_tensor, lambda batch: torch.stack(batch.unbind())),
    "jagged": (
        lambda samples: torch.nested.nested_tensor(of_lengths(samples), layout=torch.jagged),
        lambda batch: batch.values(),
    ),
}


class Reads(L.LightningModule):
    def __init__(self, kind: str, *, by_rank: bool = False) -> None:
        super().__init__()
        self.collate, self.rows = KINDS[kind]
        self.by_rank = by_rank
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "ab"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(self.rows(batch)).square().mean()
        self.log("loss", loss, batch_size=BATCH)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(self.rows(batch))

    def train_dataloader(self) -> Any:
        seed = self.trainer.strategy.mesh_rank if self.by_rank else 0
        generator = torch.Generator().manual_seed(seed)
        data: Any = [torch.randn(WIDTH, generator=generator) for _ in range(2 * BATCH)]
        return DataLoader(data, batch_size=BATCH, collate_fn=self.collate)

    predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(kind: str, strategy: Any = "auto", devices: int = 1, **options: Any) -> Reads:
    """Fit twice and predict with one Trainer, which copies it for ranks of one process."""
    torch.manual_seed(0)
    model = Reads(kind, **options)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(model)
    trainer.predict(model)
    return model


SCHEMES: dict[str, Callable[[], Any]] = {
    "zero3": lambda: ZeRO3Strategy(backend="in_process", announce=False),
    "tensor_parallel": lambda: TensorParallelStrategy(backend="in_process", announce=False),
    "pipeline_parallel, whole": lambda: PipelineParallelStrategy(
        backend="in_process", announce=False, num_microbatches=1
    ),
    "pipeline_parallel": lambda: PipelineParallelStrategy(
        backend="in_process", announce=False, num_microbatches=2
    ),
}
UNCUT = ("packed", "of a package")


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_may_be_of_any_kind(kind: str, scheme: str) -> None:
    """Packed sequences were refused by what notes the memory of a step, under every strategy.

    A mapping that cannot be pickled, and a nested tensor, ended the second run of a Trainer.
    """
    if scheme == "pipeline_parallel" and kind in UNCUT:
        with pytest.raises(ConfigError, match="num_microbatches=1"):
            fitted(kind, SCHEMES[scheme](), 2)
        return
    ours, expected = fitted(kind, SCHEMES[scheme](), 2), fitted(kind)
    for weight, other in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("kind", ["of a package", "sparse", "nested", "jagged", "packed"])
def test_batches_of_any_kind_that_differ_between_ranks_are_noticed(kind: str) -> None:
    """Of sparse tensors and of objects of other classes nothing was compared."""
    with pytest.raises(ConfigError, match="must be given the same batches"):
        fitted(kind, SCHEMES["tensor_parallel"](), 2, by_rank=True)
