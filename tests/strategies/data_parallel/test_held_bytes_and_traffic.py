"""What each rank holds and sends equals the formulas of the design, for P parameters on N ranks."""

from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.backends.traffic import OperationTraffic, ring_share
from lightning_shard.data_parallel.held_bytes import HeldBytes
from tests.strategies.models import ExampleGPT, Trained
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    GlobalBatches,
    ignoring,
    quiet_trainer,
)

pytestmark = ignoring()

# Bytes per parameter with fp32 Adam: parameters, gradients, optimizer state; each is the sum of
# what is replicated and what is divided by N.
BYTES_PER_PARAMETER = {
    "shard_ddp": ((4, 0), (4, 0), (8, 0)),
    "zero1": ((4, 0), (4, 0), (0, 8)),
    "zero2": ((4, 0), (0, 4), (0, 8)),
    "zero3": ((0, 4), (0, 4), (0, 8)),
}
PADDING = 0.01
Snapshot = dict[str, OperationTraffic]


@dataclass
class Census(L.Callback):
    """Counts on every rank; after the fit rank 0's copy has the figures of all ranks.

    Attributes:
        blocks: Elements of the units of repeated blocks, padding included.
        root_numel: Of the other units.
        num_params: Parameter tensors, each with one byte in the agreement on usage.
    """

    held: list[HeldBytes] = field(default_factory=list)
    sent: list[list[Snapshot]] = field(default_factory=list)
    blocks: int = 0
    root_numel: int = 0
    num_params: int = 0
    _held: HeldBytes | None = None
    _snapshots: list[Snapshot] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._held = trainer.strategy.held_bytes()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._snapshots.append(trainer.strategy.collectives.traffic.snapshot())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        for unit in strategy.engine.units:
            numel = sum(flat.layout.full_numel for flat in unit.flats)
            if unit.is_root:
                self.root_numel += numel
            else:
                self.blocks += numel
        self.num_params = sum(len(flat.params) for flat in strategy.engine.flats)
        self.held = strategy.collectives.all_gather_object(self._held)
        steps = zip(self._snapshots, self._snapshots[1:], strict=False)
        mine = [_difference(before, after) for before, after in steps]
        self.sent = strategy.collectives.all_gather_object(mine)

    def is_agreement(self, elements: float) -> bool:
        """Whether a rank sends so much to agree on which parameters were used.

        One byte for each, and a few bytes of checks: 17 where hooks may edit gradients, before
        the hooks, the clipping and the update.
        """
        least, most = (ring_share(2 * (self.num_params + n), len(self.held)) for n in (0, 80))
        return least <= elements <= most


def _difference(before: Snapshot, after: Snapshot) -> Snapshot:
    nothing = OperationTraffic()
    return {
        name: OperationTraffic(
            calls=total.calls - before.get(name, nothing).calls,
            elements=total.elements - before.get(name, nothing).elements,
            bytes=total.bytes - before.get(name, nothing).bytes,
        )
        for name, total in after.items()
    }


class OnlyBlocks(Trained):
    """Every parameter lies in a repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    @staticmethod
    def data(num_samples: int) -> torch.utils.data.TensorDataset:
        return torch.utils.data.TensorDataset(torch.ones(num_samples, 16))


def count(model: Trained, strategy: str, num_ranks: int, **options: Any) -> Census:
    census = Census()
    defaults = {"max_steps": 4, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](backend="in_process", bucket_mb=SMALL_BUCKET_MB),
        devices=num_ranks,
        callbacks=[census],
        **(defaults | options),
    )
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps=4))
    return census


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_held_bytes(strategy: str, num_ranks: int) -> None:
    model = ExampleGPT()
    num_params = sum(param.numel() for param in model.parameters())
    census = count(model, strategy, num_ranks)
    expected = [
        (full + shared / num_ranks) * num_params for full, shared in BYTES_PER_PARAMETER[strategy]
    ]
    assert len(census.held) == num_ranks
    for held in census.held:
        got = [held.parameters, held.gradients, held.optimizer_state]
        assert got == pytest.approx(expected, rel=PADDING)
        assert held.total == pytest.approx(sum(expected), rel=PADDING)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_a_step(strategy: str, num_ranks: int) -> None:
    model = ExampleGPT()
    num_params = sum(param.numel() for param in model.parameters())
    census = count(model, strategy, num_ranks)
    padded = census.blocks + census.root_numel
    assert padded == pytest.approx(num_params, rel=PADDING)
    share = (num_ranks - 1) / num_ranks
    once, twice = padded * share, 2 * padded * share
    gathered = (2 * census.blocks + census.root_numel) * share  # forward and backward; forward
    expected = {
        "shard_ddp": {"all_reduce": twice},
        "zero1": {"all_reduce": 0, "reduce_scatter": once, "all_gather": once},
        "zero2": {"all_reduce": 0, "reduce_scatter": once, "all_gather": once},
        "zero3": {"all_reduce": 0, "reduce_scatter": once, "all_gather": gathered},
    }[strategy]
    for step in (step for steps in census.sent for step in steps):
        elements = {name: one.elements for name, one in step.items() if one.elements}
        agreement = elements["all_reduce"] - expected["all_reduce"]
        assert census.is_agreement(agreement)
        assert elements == expected | {"all_reduce": elements["all_reduce"]}
        floats = sum(elements.values()) - agreement
        assert sum(one.bytes for one in step.values()) == 4 * floats + agreement


def test_traffic_of_stage_3_is_3p_when_every_parameter_lies_in_a_block() -> None:
    model = OnlyBlocks()
    num_params = sum(param.numel() for param in model.parameters())
    census = count(model, "zero3", 4)
    assert (census.blocks, census.root_numel) == (num_params, 0)
    for step in (step for steps in census.sent for step in steps):
        sent = step["reduce_scatter"].elements + step["all_gather"].elements
        assert sent == 3 * num_params * 3 // 4


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_accumulation(strategy: str) -> None:
    """Stages 0 and 1 send no gradients until the boundary; 2 and 3 have nowhere to keep them.

    The callback has a hook that meets gradients: from stage 1 on, ranks agree after every
    micro-batch which there are.
    """
    census = count(ExampleGPT(), strategy, 2, accumulate_grad_batches=3, max_steps=2)
    padded = census.blocks + census.root_numel
    for batches in census.sent:
        reduced = [_elements(batch, "reduce_scatter") for batch in batches]
        summed = [_elements(batch, "all_reduce") for batch in batches]
        # batch 0 is warm-up; 2 and 5 are boundaries
        between = [summed[number] for number in (0, 2, 3)]
        assert (
            not any(between) if strategy == "shard_ddp" else all(map(census.is_agreement, between))
        )
        gradients = padded if strategy == "shard_ddp" else 0
        assert census.is_agreement(summed[1] - gradients)
        assert summed[4] == summed[1]
        each = padded // 2
        assert (
            reduced
            == {
                "shard_ddp": [0, 0, 0, 0, 0],
                "zero1": [0, each, 0, 0, each],
                "zero2": [each, each, each, each, each],
                "zero3": [each, each, each, each, each],
            }[strategy]
        )


def _elements(sent: Snapshot, operation: str) -> int:
    return sent[operation].elements if operation in sent else 0


def test_a_frozen_or_tied_parameter_costs_what_it_must() -> None:
    model = ExampleGPT()
    model.head.weight = model.byte_embedding.weight  # held once
    model.position_embedding.requires_grad_(False)  # no gradient, no state
    frozen = model.position_embedding.weight.numel()
    trained = sum(param.numel() for param in model.parameters()) - frozen
    for held in count(model, "zero3", 2).held:
        assert held.parameters == pytest.approx(4 * (trained + frozen) / 2, rel=PADDING)
        assert held.gradients == pytest.approx(4 * trained / 2, rel=PADDING)
        assert held.optimizer_state == pytest.approx(8 * trained / 2, rel=PADDING)
