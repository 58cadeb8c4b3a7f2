"""`torch.distributed.pipelining`'s schedules on in-process ranks: gradients as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lightning_shard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

NUM_RANKS, NUM_MICROBATCHES, WIDTH = 2, 4, 4


def v_shaped(rank: int) -> list[int]:
    return [rank, 2 * NUM_RANKS - 1 - rank]


def looped(rank: int) -> list[int]:
    return [rank, NUM_RANKS + rank]


def one_each(rank: int) -> list[int]:
    return [rank]


SCHEDULES: dict[str, Callable[[int], list[int]]] = {
    "ScheduleGPipe": one_each,
    "Schedule1F1B": one_each,
    "ScheduleInterleaved1F1B": looped,
    "ScheduleLoopedBFS": looped,
    "ScheduleInterleavedZeroBubble": looped,
    "ScheduleZBVZeroBubble": v_shaped,
    "ScheduleDualPipeV": v_shaped,
}


def make_blocks(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * NUM_MICROBATCHES, WIDTH, generator=generator) for _ in range(2))


def single_device_gradients(num_stages: int) -> tuple[float, list[list[Tensor]]]:
    blocks, (inputs, target) = make_blocks(num_stages), data()
    loss = loss_of(nn.Sequential(*blocks)(inputs), target)
    loss.backward()
    return loss.item(), [[p.grad for p in block.parameters()] for block in blocks]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    stages_of = SCHEDULES[name]
    num_stages = NUM_RANKS * len(stages_of(0))
    loss, gradients = single_device_gradients(num_stages)

    def fn(rank: int) -> float:
        blocks, (inputs, target) = make_blocks(num_stages), data()
        mine = stages_of(rank)
        stages = [
            PipelineStage(blocks[index], index, num_stages, torch.device("cpu")) for index in mine
        ]
        given: Any = stages[0] if stages_of is one_each else stages
        schedule = getattr(pipelining, name)(given, NUM_MICROBATCHES, loss_fn=loss_of)
        losses: list[Tensor] = []
        arguments = (inputs,) if 0 in mine else ()
        if num_stages - 1 in mine:
            schedule.step(*arguments, target=target, losses=losses)
        else:
            schedule.step(*arguments)
        for index in mine:
            for parameter, expected in zip(
                blocks[index].parameters(), gradients[index], strict=True
            ):
                torch.testing.assert_close(parameter.grad, expected)
        return torch.stack(losses).mean().item() if losses else loss

    assert run_ranks(fn, NUM_RANKS) == pytest.approx([loss] * NUM_RANKS)
