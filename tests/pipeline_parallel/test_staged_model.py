"""Stages of one model in one process: their runs, one after the other, are the whole step."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.pipeline_parallel.blocks import find_blocks
from lightning_shard.pipeline_parallel.partition import (
    Partition,
    parameter_stages,
    partition_blocks,
)
from lightning_shard.pipeline_parallel.stage_run import Probe, StageRun
from lightning_shard.pipeline_parallel.staged_model import StagedModel


class Net(nn.Module):
    """Counts its calls in a buffer before the blocks."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.embed = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=None))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def staged(net: nn.Module, split: Sequence[int], **options: Any) -> tuple[StagedModel, Partition]:
    partition = partition_blocks(net, find_blocks(net), num_stages=len(split) + 1, split=split)
    shapes = {param: param.shape for param in net.parameters()}
    return StagedModel(
        net, partition, parameter_stages(net, partition), shapes, **options
    ), partition


def run_stages(net: nn.Module, model: StagedModel, bounds: Sequence[int], x: Tensor) -> StageRun:
    """Run every stage with what the one before has given out."""
    run, names = None, model.block_names
    for stage, (first, stop) in enumerate(pairwise(bounds)):
        needed = None
        if stop < len(names):
            probe = Probe(stop)
            with model.running(probe, stage + 1):
                probe.forward(lambda: net(x))
            needed = probe.needed
            assert needed is not None
        received = None if run is None else [one.detach() for one in run.outputs]
        run = StageRun(stage, first, stop, names, needed=needed, received=received)
        with model.running(run, stage):
            run.forward(lambda: net(x))
    assert run is not None
    return run


@pytest.mark.parametrize("split", [[1], [2], [1, 2], [1, 2, 3]])
def test_the_stages_together_are_the_step(split: list[int]) -> None:
    net, x = Net().eval(), torch.randn(3, 2)
    expected = net(x)
    model, partition = staged(net, split)
    with model.batch():
        result = run_stages(net, model, partition.bounds, x).result
    assert torch.equal(result, expected)


def test_outside_of_steps_the_model_is_full() -> None:
    net, x = Net().eval(), torch.randn(3, 2)
    expected, classes = net(x), [type(one) for one in net.modules()]
    attributes, params = [sorted(vars(one)) for one in net.modules()], dict(net.named_parameters())
    model, partition = staged(net, [2])
    with model.batch():
        run_stages(net, model, partition.bounds, x)
    assert dict(net.named_parameters()).keys() == params.keys()
    assert all(param is params[name] for name, param in net.named_parameters())
    assert all(isinstance(block, nn.Sequential) for block in net.blocks)
    assert torch.equal(net(x), expected)
    model.restore()
    assert [type(one) for one in net.modules()] == classes
    assert [sorted(vars(one)) for one in net.modules()] == attributes


def test_a_later_stage_of_the_same_rank_does_not_count_batches_again() -> None:
    """Running statistics without a momentum are weighted by that count."""
    net, alone, x = Net(), Net(), torch.randn(5, 2)
    model, partition = staged(net, [1, 2, 3], rank_stages=[0, 3])
    for _ in range(2):
        alone(x)
        with model.batch():
            for stage in (0, 3):
                run = StageRun(stage, 0, 4, model.block_names, needed=None)
                with model.running(run, stage):
                    net.embed(x)
    del partition
    for name, buffer in alone.embed.named_buffers():
        torch.testing.assert_close(net.embed.get_buffer(name), buffer, msg=name)


def test_a_run_names_the_block_that_came_out_of_order() -> None:
    net, x = Net(), torch.randn(3, 2)
    model, _ = staged(net, [2])
    run = StageRun(0, 0, 2, model.block_names, needed=None)
    with (
        model.batch(),
        model.running(run, 0),
        pytest.raises(
            ConfigError, match=r"'blocks.3' after the blocks of .*'blocks.0' to 'blocks.1'"
        ),
    ):
        run.forward(lambda: net.blocks[3](net.blocks[0](net.embed(x))))


def test_errors_in_a_block_name_it() -> None:
    net = Net()
    model, _ = staged(net, [2])
    run = StageRun(0, 0, 2, model.block_names, needed=None)
    with (
        model.batch(),
        model.running(run, 0),
        pytest.raises(RuntimeError, match=r"block 'blocks.0' on stage 0 .* shape \(3, 7\)"),
    ):
        run.forward(lambda: net.blocks[0](torch.ones(3, 7)))


def test_the_copy_of_a_copy_belongs_to_no_stage_either() -> None:
    """A hook that copies a teacher from a copy left it the pipeline's blocks, with their places."""
    net = Net()
    model, _ = staged(net, [2])
    first = copy.deepcopy(net)
    second = copy.deepcopy(first)
    model.restore_copies()
    kinds = {type(block) for one in (first, second) for block in one.blocks}
    assert kinds == {nn.Sequential}
    assert {type(block) for block in net.blocks} != kinds
    model.restore()
    assert {type(block) for block in net.blocks} == kinds
