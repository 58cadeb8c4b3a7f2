"""What a step writes to a view stays, where each rank has a part of the tensor: weights, logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_shard.errors import ConfigError
from tests.strategies.decoders import DECODER_SCHEMES, Decoder, assert_as_alone
from tests.strategies.parity import ignoring
from tests.strategies.stacks import fit

pytestmark = ignoring()


def _kept(weight: Tensor) -> None:
    """Write to a view, to the weight, and to the view again."""
    row = weight[0]
    weight.mul_(1.1)
    row.add_(0.1)
    row[1:3] = row[0]
    torch.mul(row, 1.1, out=row)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda weight: weight[0].mul_(1.1),
    "rows": lambda weight: weight[1:3].zero_(),
    "column": lambda weight: weight[..., 0].mul_(1.1),
    "narrow": lambda weight: weight.narrow(1, 1, 2).mul_(1.1),
    "diagonal": lambda weight: weight.diagonal().fill_(0.3),
    "transposed": lambda weight: weight.t()[0].add_(0.1),
    "unbind": lambda weight: weight.unbind(1)[1].mul_(1.1),
    "chunk": lambda weight: weight.chunk(2)[0].mul_(1.1),
    "each row": lambda weight: [row.div_(row.norm() + 1) for row in weight],
    "flat": lambda weight: weight.view(-1)[3].add_(1.0),
    "of each other": lambda weight: weight[0].copy_(weight[1]),
    "foreach": lambda weight: torch._foreach_mul_([weight], 1.1),
    "foreach of rows": lambda weight: torch._foreach_mul_([weight[0], weight[2]], 1.1),
    "foreach of it and a row": lambda weight: torch._foreach_mul_([weight, weight[0]], 1.1),
    "foreach of a row and it": lambda weight: torch._foreach_add_([weight[1], weight], 0.1),
    "initialised anew": lambda weight: torch.nn.init.constant_(weight, 0.2),
    "a row initialised": lambda weight: torch.nn.init.constant_(weight[1], 0.2),
    "by name": lambda weight: torch.clamp_(input=weight, min=-0.1, max=0.1),
    "kept": _kept,
}


class WritesInStep(Decoder):
    write: Callable[[Tensor], Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        block = self.blocks[0]
        with torch.no_grad():
            for weight in (self.head.weight, block.up.weight, block.down.weight.data):
                type(self).write(weight)
        return super().training_step(batch, batch_idx)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "zero3"])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_step_writes_to_a_view_of_a_weight_stays(write: str, scheme: str) -> None:
    """It was written to a gathered copy, and lost: weights were 13 % to 180 % off."""
    style: Any = type("Writes", (WritesInStep,), {"write": staticmethod(WRITES[write])})
    assert_as_alone(style, scheme)


def _twice(logits: Tensor) -> None:
    column = logits[..., 1]
    column.mul_(2)
    column.add_(0.1)


IN_GRAPH: dict[str, Callable[[Tensor], Any]] = {
    "masked column": lambda logits: logits[..., 3].fill_(-1e4),
    "first position": lambda logits: logits[:, 0].mul_(2),
    "narrow": lambda logits: logits.narrow(-1, 5, 3).zero_(),
    "transposed": lambda logits: logits.transpose(0, -1)[1].mul_(2),
    "detached": lambda logits: logits.detach()[..., 1].mul_(2),
    "in place by name": lambda logits: F.relu(logits[..., 1:4], inplace=True),
    "one by the other": lambda logits: logits[..., :6].add_(logits[..., 6:]),
    "flat": lambda logits: logits.flatten(0, 1)[:, 2].mul_(3),
    "twice": _twice,
}


class WritesLogits(Decoder):
    write: Callable[[Tensor], Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.hidden(self.embed(batch[0]))) * 1.0
        type(self).write(logits)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["tensor", "context"])
@pytest.mark.parametrize("write", IN_GRAPH)
def test_what_a_step_writes_to_a_view_of_logits_stays(write: str, scheme: str) -> None:
    """It was lost as well, with its gradient: masked logits were not."""
    style: Any = type("Writes", (WritesLogits,), {"write": staticmethod(IN_GRAPH[write])})
    assert_as_alone(style, scheme)


class WritesComputed(Decoder):
    write: Callable[[Tensor], Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        doubled, squared = 2 * self.head.weight, self.blocks[0].down.weight.square()
        type(self).write(doubled)
        type(self).write(squared)
        loss = super().training_step(batch, batch_idx)
        return loss + doubled.square().mean() + squared.t().sum(0).square().mean()


COMPUTED = {name: IN_GRAPH[name] for name in ("masked column", "first position", "detached")}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3", "zero3"])
@pytest.mark.parametrize("write", COMPUTED)
def test_what_a_step_writes_to_a_view_of_what_it_computed_from_a_weight_stays(
    write: str, scheme: str
) -> None:
    """Only views of activations stayed: those of `2 * weight` were plain copies, and lost."""
    style: Any = type("Writes", (WritesComputed,), {"write": staticmethod(COMPUTED[write])})
    assert_as_alone(style, scheme)


class ReadsOnOneRank(Decoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        row = self.head.weight.detach()[0]
        if self.trainer.strategy.mesh_rank == 0:
            assert "tensor(" in repr(row)
            assert float(row.norm()) > 0
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tensor", "tensor_zero3"])
def test_one_rank_alone_may_read_a_view(scheme: str) -> None:
    num_ranks, make = DECODER_SCHEMES[scheme]
    fit(ReadsOnOneRank, make(), devices=num_ranks)


class ReadsLate(Decoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.hidden(self.embed(batch[0]))) * 1.0
        column = logits[..., 1]
        logits.mul_(2)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + column.mean()


def test_a_view_in_a_graph_that_is_late_is_refused() -> None:
    """It had the values of before."""
    num_ranks, make = DECODER_SCHEMES["tensor"]
    with pytest.raises(ConfigError, match="Take the view again"):
        fit(ReadsLate, make(), devices=num_ranks)
