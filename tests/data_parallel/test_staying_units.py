"""Stage 3 where parameters exist once per host: units stay for a step, since they cost nothing."""

import warnings
from collections.abc import Callable
from itertools import compress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.flat_gradients import IS_SENT
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.data_parallel.units.unit import HERE
from tests.data_parallel.one_step import forward_and_backward
from tests.groups import join
from tests.processes import run_processes

NUM_BLOCKS = 4


class Blocks(nn.Module):
    """Blocks of which a forward uses some, and a layer outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = self.blocks[index](x)
        return self.head(x).square().mean()


def train(engine: DataParallelEngine, model: nn.Module, used: list[int]) -> None:
    is_mixed = engine.options.dtypes.compute is not None
    x = torch.linspace(-1, 1, 15).view(3, 5)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss: Tensor = model(x, used)
        return loss

    forward_and_backward(engine, forward)


def gradients(engine: DataParallelEngine, model: nn.Module) -> list[Tensor | None]:
    with engine.optimizer_view():
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


class TwoWays(nn.Module):
    """A block that may leave one of its layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x if self.leaves_out else self.second(x)))


def reduced_early(backend: str) -> list[int]:
    """Return how many blocks were reduced when the first one's gradients came, by backward.

    From the second one on the last block, the first to be reduced, leaves a layer out.
    """
    ranks = join(backend)
    model = Blocks()
    model.blocks = nn.ModuleList(TwoWays() for _ in range(NUM_BLOCKS))
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=3, bucket_mb=1e-5))
    found: list[int] = []

    def count(_: Tensor) -> None:
        found[-1] = sum(one.state in IS_SENT for one in engine.gradients)

    model.blocks[0].second.weight.register_hook(count)
    for number in range(4):
        model.blocks[-1].leaves_out = number > 0 and ranks.rank == 0
        found.append(0)
        train(engine, model, list(range(NUM_BLOCKS)))
        model.zero_grad()
    ranks.barrier()
    dist.destroy_process_group()
    return found


def seen(backend: str, mixed: bool) -> dict[str, Any]:
    """Return what a rank sees of a model's units."""
    ranks = join(backend)
    torch.manual_seed(0)
    model, found = Blocks(), {}
    dtypes = DTypePolicy(compute=torch.bfloat16) if mixed else DTypePolicy()
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=3, bucket_mb=1e-5, dtypes=dtypes))
    found["stay"] = [unit.stays for unit in engine.units]
    found["root"] = [unit.is_root for unit in engine.units]
    found["flats"] = [len(unit.flats) for unit in engine.units]
    every = list(range(NUM_BLOCKS))
    during: list[list[bool]] = []
    handle = model.blocks[2].register_forward_hook(
        lambda *_: during.append([unit.state in HERE for unit in engine.units])
    )
    train(engine, model, every)
    handle.remove()
    found["full in the third block"] = during[0]
    found["full after the backward"] = [unit.state in HERE for unit in engine.units]
    gradients(engine, model)
    before = ranks.traffic["all_gather"].calls
    train(engine, model, every)
    found["gathers"] = ranks.traffic["all_gather"].calls - before
    gradients(engine, model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        model.blocks[1](torch.ones(2, 5))  # outside of a step
    found["full outside of steps"] = [unit.state in HERE for unit in engine.units]
    if backend == "shm" and not mixed:
        train(engine, model, [0, 1] if ranks.rank == 0 else [2])
        found["gradients"] = gradients(engine, model)
    ranks.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return run_processes(seen, 2, backend="shm", mixed=False)


@pytest.fixture
def on_shm(both: list[dict[str, Any]]) -> dict[str, Any]:
    return both[0]


def test_units_stay_from_the_start_of_a_step_to_the_end_of_its_backward(
    on_shm: dict[str, Any],
) -> None:
    assert on_shm["root"].count(False) == NUM_BLOCKS
    assert all(on_shm["stay"])
    assert all(on_shm["full in the third block"])
    assert not any(on_shm["full after the backward"])


def test_staying_units_are_gathered_once_in_a_step(on_shm: dict[str, Any]) -> None:
    assert on_shm["gathers"] == sum(on_shm["flats"])


def test_staying_units_are_given_back_one_by_one_outside_of_steps(on_shm: dict[str, Any]) -> None:
    assert not any(on_shm["full outside of steps"])


def test_ranks_may_use_different_blocks_where_units_stay(both: list[dict[str, Any]]) -> None:
    """No unshard in a backward waits for a rank that does not come there."""
    torch.manual_seed(0)
    model = Blocks()
    for used in ([0, 1], [2]):
        (model(torch.linspace(-1, 1, 15).view(3, 5), used) / 2).backward()
    for param, *shards in zip(model.parameters(), *(one["gradients"] for one in both), strict=True):
        full = [shard for shard in shards if shard is not None]
        assert (param.grad is None) is (not full)
        if param.grad is not None:
            torch.testing.assert_close(param.grad.flatten(), torch.cat(full))


def test_a_block_that_was_not_all_used_holds_the_others_up_but_once() -> None:
    for first, _, *others in run_processes(reduced_early, 2, backend="shm"):
        assert min(first, *others) >= NUM_BLOCKS - 1


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("backend", "mixed"), [("gloo", False), ("shm", True)])
def test_only_the_root_stays_where_each_rank_has_parameters_of_its_own(
    backend: str, mixed: bool
) -> None:
    found = run_processes(seen, 2, backend=backend, mixed=mixed)[0]
    root, flats = found["root"], found["flats"]
    assert found["stay"] == root
    of_root = [*compress(found["full in the third block"], root)]
    others = found["full in the third block"].count(True) - of_root.count(True)
    assert others <= 2  # that block, and the one whose unshard was waited for
    assert not any(found["full after the backward"])
    assert found["gathers"] == 2 * sum(flats) - sum(compress(flats, root))
    assert not any(found["full outside of steps"])


def graphs(backend: str) -> list[int]:
    """Return the number of graphs of a compiled model after each of a few steps."""
    warnings.simplefilter("ignore")  # Dynamo's own
    ranks = join(backend)
    model, made, found = Blocks(), [], []
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=3, bucket_mb=1e-5))

    def noted(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=noted)
    for _ in range(3):
        train(engine, compiled, list(range(NUM_BLOCKS)))
        model.zero_grad()
        found.append(len(made))
    ranks.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_where_units_stay() -> None:
    assert run_processes(graphs, 2, backend="shm")[0] == [1, 1, 1]
    assert run_processes(graphs, 2, backend="gloo")[0][0] > 1
