"""What travels lies where its owner looks for it."""

import torch
from torch import nn

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.async_sgd.wire import Kind, Message, Wire
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.testing import run_ranks


class Mixed(nn.Module):
    """Three formats, so three buffers; sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(35.0).view(7, 5))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.phases = nn.Parameter(torch.arange(5.0).to(torch.complex128))
        self.wide = nn.Parameter(torch.arange(11, dtype=torch.float64))


def wire_of(num_ranks: int) -> tuple[Mixed, Wire]:
    group = torch.distributed.group.WORLD
    assert group is not None
    model = Mixed()
    ranks = get_backend("in_process").collectives(group)
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=1))
    return model, Wire(engine.flats, num_ranks)


def test_the_parts_of_a_gradient_make_up_the_full() -> None:
    def program(rank: int) -> None:
        model, wire = wire_of(3)
        names = {param: name for name, param in model.named_parameters()}
        params = [param for flat in wire.flats for param in flat.params]
        grads = [None if names[p] == "vector" else torch.randn(p.shape).to(p) for p in params]
        parts = []
        for owner in range(3):
            message = wire.gradient(grads, owner)
            message.address(Kind.GRADIENT, 5, [owner, 2, 3])
            copy = Message(wire, message.data.clone())  # as it comes out of the other end
            assert (copy.kind, copy.received, copy.version) == (Kind.GRADIENT, 5, [owner, 2, 3])
            parts.append(wire.own_gradient(copy, owner))
        for index, grad in enumerate(grads):
            got = [part[index] for part in parts if part[index] is not None]
            if grad is None:
                assert not got
            else:
                assert torch.equal(torch.cat(got), grad.flatten())

    run_ranks(program, 3)


def test_shards_of_all_ranks_make_up_the_parameters() -> None:
    def program(rank: int) -> list[list[float]]:
        model, wire = wire_of(2)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(100 * rank)
        here = wire.shard()
        here.address(Kind.SHARD, 0, [0, 0])
        group = torch.distributed.group.WORLD
        assert group is not None
        ranks = get_backend("in_process").collectives(group)
        both = ranks.all_gather_object(here.data)
        wire.take_over(Message(wire, both[1 - rank]), 1 - rank)
        return [param.flatten().real.tolist() for param in model.parameters()]

    first, second = run_ranks(program, 2)
    assert first == second
    assert {value // 100 for values in first for value in values} == {0.0, 1.0}
