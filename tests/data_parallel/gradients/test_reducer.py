"""When gradients travel, and in which order; which parameters have one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.gradients.gradient_buffer import GradientBuffer
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies
from tests.groups import engine_of


class Branches(nn.Module):
    """Three branches that complete in the order of `order`'s reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.branches[index](x)
        return x


def make_engine(model: nn.Module, stage: int) -> DataParallelEngine:
    return engine_of(model, stage=stage, bucket_mb=1e-9)


def backward(engine: DataParallelEngine, order: list[int]) -> None:
    with engine.step():
        loss = engine.model(torch.ones(1, 2), order).sum()
    with engine.backward():
        loss.backward()


def watch(engine: DataParallelEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    launched: list[int] = []
    begin = FlatGradients.begin_reduce

    def begin_reduce(gradients: FlatGradients, **given: bool) -> None:
        if gradients in engine.gradients:
            launched.append(engine.gradients.index(gradients))
        begin(gradients, **given)

    monkeypatch.setattr(FlatGradients, "begin_reduce", begin_reduce)
    return launched


@pytest.mark.parametrize("stage", range(3))
def test_the_order_is_learnt_from_rank_zero(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(rank: int) -> list[int]:
        engine = make_engine(Branches(), stage)
        launched = watch(engine, monkeypatch)
        orders = [[2, 0, 1], [0, 1, 2]]
        for _ in range(2):
            backward(engine, orders[rank])
        monkeypatch.undo()
        return launched

    # first the reverse of registration, then as rank 0 completes; rank 1 completes otherwise
    assert run_ranks(fn, 2) == [[2, 1, 0, 1, 0, 2]] * 2


@pytest.mark.parametrize("stage", range(3))
def test_what_reentrant_checkpoints_call_once_travels_while_backward_runs(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(rank: int) -> list[int]:
        engine = make_engine(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))), stage)
        launched, sent = watch(engine, monkeypatch), []
        for twice in (False, False, True, True, False):
            launched.clear()
            x = torch.ones(1, 2, requires_grad=True)
            with engine.step():
                for layer in [*engine.model, *([engine.model[-1]] if twice else [])]:
                    x = checkpoint(layer, x, use_reentrant=True)
            with engine.backward():
                x.sum().backward()
                sent.append(len(launched))
        return sent

    # the first of a kind waits for its end, and those of a kind that has brought gradients twice
    expected = [0, 3, 0, 0, 3] if stage < 2 else [3] * 5
    assert run_ranks(fn, 1) == [expected]
    monkeypatch.undo()


@pytest.mark.parametrize("stage", range(3))
def test_a_branch_that_is_not_used_travels_all_the_same(stage: int) -> None:
    def fn(rank: int) -> list[bool]:
        engine = make_engine(Branches(), stage)
        backward(engine, [0, 1] if rank else [0])
        return [bool(valid) for one in engine.gradients for valid in one.states.is_valid]

    assert run_ranks(fn, 2) == [[True, True, False]] * 2


@pytest.mark.parametrize(("stage", "operations"), [(0, {}), (1, {}), (2, {"reduce_scatter": 3})])
def test_no_sync_sends_nothing_under_stages_0_and_1(stage: int, operations: dict[str, int]) -> None:
    def fn(rank: int) -> dict[str, int]:
        engine = make_engine(Branches(), stage)
        engine.collectives.traffic.reset()
        with engine.no_sync():
            backward(engine, [0, 1, 2])
        return {name: one.calls for name, one in engine.collectives.traffic.items()}

    assert run_ranks(fn, 2) == [operations] * 2


def test_a_backward_that_fails_can_be_repeated() -> None:
    def fn(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = Branches()
        engine = make_engine(model, 0)
        with pytest.raises(ZeroDivisionError), engine.backward():
            raise ZeroDivisionError
        backward(engine, [0, 1, 2])
        assert model.branches[0].weight.grad is not None
        return model.branches[0].weight.grad

    first, second = run_ranks(fn, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("zeroed", [True, False])
def test_zeroed_averages_give_their_memory_to_backward(
    zeroed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroed averages kept their memory while backward took more."""

    def held_at_first_reduction(engine: DataParallelEngine) -> list[bool]:
        held: list[bool] = []
        begin = FlatGradients.begin_reduce

        def begin_reduce(gradients: FlatGradients, **given: bool) -> None:
            if gradients in engine.gradients and not held:
                held.extend(one.buffer.local is not None for one in engine.gradients)
            begin(gradients, **given)

        monkeypatch.setattr(FlatGradients, "begin_reduce", begin_reduce)
        backward(engine, [0, 1, 2])
        monkeypatch.undo()
        return held

    def fn(rank: int) -> list[bool]:
        engine = make_engine(Branches(), 3)
        backward(engine, [0, 1, 2])
        if zeroed:
            for param in engine.model.parameters():
                param.grad = None
        return held_at_first_reduction(engine)

    # the last one's gradient has come: its average takes the memory soon
    assert run_ranks(fn, 1) == [[not zeroed, not zeroed, True]]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reduction_that_has_ended_gives_its_memory_to_the_next_bucket(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduction had ended and kept its memory while the next bucket took more."""

    def fn(rank: int) -> int:
        engine = make_engine(Branches(), stage)
        most, allocate = 0, GradientBuffer.allocate

        def allocate_and_count(buffer: GradientBuffer) -> Tensor:
            nonlocal most
            full = allocate(buffer)
            buffers = [one.buffer for one in engine.gradients]
            if buffer in buffers:
                held = [one for one in buffers if one.full is not None or one._sent is not None]
                most = max(most, len(held))
            return full

        monkeypatch.setattr(GradientBuffer, "allocate", allocate_and_count)
        backward(engine, [0, 1, 2])
        return most

    assert run_ranks(fn, 1) == [1]  # a rank alone waits for nobody


def test_a_reduction_whose_second_half_is_not_begun_has_not_ended() -> None:
    """A reduction whose second half is not begun was taken for ended."""

    def fn(rank: int) -> list[bool]:
        groups = in_copies(2)
        engine = DataParallelEngine(Branches(), groups, EngineOptions(stage=2, bucket_mb=1e-9))
        last = engine.gradients[-1]
        with engine.step():
            loss = engine.model(torch.ones(1, 2), [0, 1, 2]).sum()
        seen: list[bool] = []

        def after_its_reduction_has_begun(_: Tensor) -> None:
            dist.barrier()  # by which every rank has sent its first half
            seen.append(last.is_reduced_by_all)

        engine.model.branches[1].weight.register_hook(after_its_reduction_has_begun)
        with engine.backward():
            loss.backward()
        return [*seen, last.is_reduced_by_all]

    assert run_ranks(fn, 4) == [[False, True]] * 4
