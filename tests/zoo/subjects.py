"""What the zoo's models have in common: a loss, an optimizer, and samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.features.columns import GLOBAL_BATCH

NUM_STEPS = 3
NUM_SAMPLES = NUM_STEPS * GLOBAL_BATCH
VOCABULARY, CONTEXT = 32, 8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained."""

    module: L.LightningModule
    data: Dataset[Any]
    collate: Callable[[Any], Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)


class Trained(L.LightningModule):
    """A network and its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Language(Trained):
    """A causal language model of transformers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch[0], labels=batch[0]).loss


def texts() -> Tensor:
    """Return random tokens, (S, T)."""
    return torch.randint(VOCABULARY, (NUM_SAMPLES, CONTEXT), generator=generator())


def images(num_views: int = 1) -> list[Tensor]:
    """Return random images, (S, 3, 8, 8) each."""
    stream = generator()
    return [torch.randn(NUM_SAMPLES, 3, 8, 8, generator=stream) for _ in range(num_views)]


def generator() -> torch.Generator:
    """Return the stream that samples are drawn from, at its beginning."""
    return torch.Generator().manual_seed(3)
