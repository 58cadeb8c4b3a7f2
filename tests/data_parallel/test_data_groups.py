"""Several copies of the state: who holds and who sends what, counted, on 2 copies of 2 ranks."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.backends.traffic import OperationTraffic, ring_share
from lightning_shard.checkpoint.full import full_module_state
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim.clipping import global_grad_norm
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.copies import in_copies

T = TypeVar("T")
NUM_COPIES = SHARD = 2
NUM_RANKS = NUM_COPIES * SHARD
WIDTH = 8
NUM_BLOCKS = 3
NUMEL = NUM_BLOCKS * WIDTH * WIDTH  # every block a unit, no padding
Sent = dict[str, dict[str, tuple[int, int]]]  # by group and operation: calls, elements


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


class Training:
    """A model, its engine and optimizer on one rank."""

    def __init__(self, stage: int, dtypes: DTypePolicy | None = None) -> None:
        self.model = Blocks()
        self.groups = in_copies(NUM_COPIES)
        options = EngineOptions(stage=stage, bucket_mb=1e-9, dtypes=dtypes or DTypePolicy())
        self.engine = DataParallelEngine(self.model, self.groups, options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.sharded = ShardedOptimizer(self.optimizer, self.engine)
        self.rank = self.groups.dp.rank

    def backward(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        generator = torch.Generator().manual_seed(self.rank)
        with self.engine.step():
            batch = torch.randn(3, WIDTH, generator=generator)
            loss = self.model(batch, order).square().mean()
        with self.engine.backward():
            loss.backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def shards(self) -> Tensor:
        return torch.cat([flat.shard for flat in self.engine.flats]).clone()


def sent_by(groups: DataGroups, action: Callable[[], object]) -> Sent:
    """What this rank sends inside `action`, by group; what costs nothing is left out."""
    named = {"dp": groups.dp, "shard": groups.shard, "replicate": groups.replicate}
    before = {name: one.traffic.snapshot() for name, one in named.items() if one is not None}
    action()
    sent: Sent = {}
    for name, snapshot in before.items():
        one = named[name]
        assert one is not None
        for operation, total in one.traffic.items():
            earlier = snapshot.get(operation, OperationTraffic())
            calls = total.calls - earlier.calls
            if calls:
                elements = total.elements - earlier.elements
                sent.setdefault(name, {})[operation] = calls, elements
    return sent


def on_ranks(
    body: Callable[[Training], T], stage: int, dtypes: DTypePolicy | None = None
) -> list[T]:
    results = run_ranks(lambda rank: body(Training(stage, dtypes)), NUM_RANKS)
    return [result for result in results if result is not None]


def agreement(num_checks: int) -> tuple[int, int]:
    """One message of a byte for each parameter, one of failed updates, and the given checks."""
    return 1, ring_share(2 * (NUM_BLOCKS + 1 + num_checks), NUM_RANKS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathers_stay_in_a_copy_and_a_share_of_the_gradients_goes_between(stage: int) -> None:
    def body(training: Training) -> Sent:
        training.step()
        return sent_by(training.groups, training.step)

    inside = ring_share(NUMEL, SHARD)
    gathers = (2 * NUM_BLOCKS, 2 * inside) if stage == 3 else (NUM_BLOCKS, inside)
    between = ring_share(2 * (NUMEL // SHARD), NUM_COPIES)
    for sent in on_ranks(body, stage):
        assert sent == {
            "dp": {"all_reduce": agreement(8 if stage == 3 else 0)},
            "shard": {"reduce_scatter": (NUM_BLOCKS, inside), "all_gather": gathers},
            "replicate": {"all_reduce": (NUM_BLOCKS, between)},
        }


def test_without_sharding_everyone_averages_at_once() -> None:
    def body(training: Training) -> Sent:
        training.step()
        return sent_by(training.groups, training.step)

    calls, elements = agreement(1)  # whether user code has changed parameters
    full = calls + NUM_BLOCKS, elements + ring_share(2 * NUMEL, NUM_RANKS)
    assert on_ranks(body, stage=0) == [{"dp": {"all_reduce": full}}] * NUM_RANKS


def test_gradients_keep_their_travel_format_between_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """They went on in the float32 that shards are kept in: twice the bytes between nodes."""
    averaged: list[torch.dtype] = []
    plain = Collectives.all_reduce

    def noted(self: Collectives, tensor: Tensor, op: ReduceOpName = "sum", **options: Any) -> Any:
        if op == "avg":
            averaged.append(tensor.dtype)
        return plain(self, tensor, op, **options)

    monkeypatch.setattr(Collectives, "all_reduce", noted)
    on_ranks(Training.step, 2, DTypePolicy(reduce=torch.bfloat16))
    assert averaged == [torch.bfloat16] * NUM_BLOCKS * NUM_RANKS


@pytest.mark.parametrize(("stage", "is_silent"), [(1, True), (2, False), (3, False)])
def test_accumulation_sends_as_within_one_copy(stage: int, is_silent: bool) -> None:
    def body(training: Training) -> tuple[Sent, Sent]:
        training.step()

        def accumulate() -> None:
            with training.engine.no_sync():
                training.backward()

        return sent_by(training.groups, accumulate), sent_by(training.groups, training.backward)

    for accumulated, final in on_ranks(body, stage):
        assert ("replicate" not in accumulated) == is_silent
        assert final["replicate"]["all_reduce"][0] == NUM_BLOCKS


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_are_the_same_bit_for_bit_and_each_rank_has_its_share(stage: int) -> None:
    def body(training: Training) -> Tensor:
        for _ in range(5):
            training.step()
        return training.shards()

    first, second, *copy = on_ranks(body, stage)
    assert first.numel() == second.numel() == NUMEL // SHARD
    assert torch.equal(first, copy[0])
    assert torch.equal(second, copy[1])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_counts_each_element_once(stage: int, norm_type: float) -> None:
    def full(rank: int) -> list[Tensor]:
        model = Blocks()
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(3, WIDTH, generator=generator)).square().mean().backward()
        return [param.grad for param in model.parameters() if param.grad is not None]

    ranks = zip(*map(full, range(NUM_RANKS)), strict=True)
    grads = [torch.stack(of_ranks).mean(0) for of_ranks in ranks]
    expected = nn.utils.get_total_norm(grads, norm_type).item()

    def body(training: Training) -> tuple[float, set[str]]:
        training.backward()
        norms: list[float] = []

        def measure() -> None:
            params = list(training.model.parameters())
            norms.append(global_grad_norm(params, training.engine, norm_type).item())

        sent = sent_by(training.groups, measure)
        return norms[0], set(sent)

    for norm, groups in on_ranks(body, stage):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert groups == ({"shard"} if stage else set())


def test_full_parameters_come_on_rank_0_alone_or_on_the_first_copy() -> None:
    def body(training: Training) -> list[int]:
        come = (training.engine.full_values.each(everywhere=wanted) for wanted in (False, True))
        return [len(list(params)) for params in come]

    assert on_ranks(body, 1) == [[NUM_BLOCKS, NUM_BLOCKS], [0, NUM_BLOCKS], [0, 0], [0, 0]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_copy_is_saved(stage: int) -> None:
    def body(training: Training) -> tuple[bool, list[int], Sent]:
        training.step()
        states: list[dict[str, object]] = []

        def save() -> None:
            states.append(full_module_state(training.model, training.engine))
            states.append(full_state_dict(training.optimizer, training.engine))

        sent = sent_by(training.groups, save)
        names = [name for name, value in states[0].items() if not getattr(value, "is_meta", False)]
        assert len(states[0]) == NUM_BLOCKS  # everywhere
        return training.engine.is_first, [len(names), len(states[1])], sent

    saved = on_ranks(body, stage)
    assert [is_first for is_first, _, _ in saved] == [True, False, False, False]
    of_copy = NUM_BLOCKS if stage < 3 else 0  # each rank of it has them anyway
    assert [sizes for _, sizes, _ in saved] == [[NUM_BLOCKS, 2], [of_copy, 0], [0, 0], [0, 0]]
    assert [set(sent) for _, _, sent in saved] == [{"shard"}, {"shard"}, set(), set()]


def test_a_unit_goes_between_copies_while_the_next_one_is_computed() -> None:
    """Copies were averaged one unit after the other at the end of backward."""

    def body(training: Training) -> list[int]:
        replicate = training.groups.replicate
        assert replicate is not None
        begun: list[int] = []

        def arrived(_: Tensor) -> None:
            begun.append(replicate.traffic["all_reduce"].calls)

        for param in training.model.parameters():  # after the engine's own hooks
            param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        training.backward()
        return begun

    # when the gradients of blocks 2, 1 and 0 have come, so many averages of copies have begun
    assert on_ranks(body, stage=2) == [[0, 1, 2]] * NUM_RANKS


def test_copies_may_use_the_model_in_other_orders() -> None:
    """What completes first differs between copies; all start in one order."""

    def body(training: Training) -> Tensor:
        for _ in range(2):
            training.optimizer.zero_grad()
            training.backward((0, 1, 2) if training.rank < SHARD else (2, 0))
            training.optimizer.step()
        return training.shards()

    first, second, *copy = on_ranks(body, stage=2)
    assert torch.equal(first, copy[0])
    assert torch.equal(second, copy[1])


def test_copies_that_gather_different_blocks_are_told() -> None:
    def body(training: Training) -> None:
        training.backward((0,) if training.rank < SHARD else (1,))

    with pytest.raises(ConfigError, match="the ranks used different blocks in this step"):
        on_ranks(body, stage=3)


def test_rank_zero_gives_the_first_values_to_every_copy() -> None:
    def fn(rank: int) -> list[float]:
        model = nn.BatchNorm1d(4)
        with torch.no_grad():
            model.weight.fill_(rank)
            assert model.running_mean is not None
            model.running_mean.fill_(rank)
        DataParallelEngine(model, in_copies(NUM_COPIES), EngineOptions(stage=2))
        return [*model.weight.tolist(), *model.running_mean.tolist()]

    assert run_ranks(fn, NUM_RANKS) == [[0.0] * 8] * NUM_RANKS


def test_a_twin_counts_where_its_original_does() -> None:
    def fn(rank: int) -> bool:
        groups = in_copies(NUM_COPIES)
        duplicate = groups.duplicate()
        assert duplicate.dp.group is not groups.dp.group
        assert duplicate.shard.group is not groups.shard.group
        assert dist.get_process_group_ranks(duplicate.shard.group) == dist.get_process_group_ranks(
            groups.shard.group
        )
        return (
            duplicate.shard.traffic is groups.shard.traffic
            and duplicate.replicate is groups.replicate
        )

    assert run_ranks(fn, NUM_RANKS) == [True] * NUM_RANKS
