"""Stage 3: what is in memory when, and in which order it comes and goes."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.units.unit import HERE, Unit
from lightning_shard.testing import run_ranks
from tests.data_parallel.test_training import SMALL_BUCKET_MB, Net
from tests.groups import engine_of


def make_engine(model: nn.Module) -> DataParallelEngine:
    return engine_of(model, stage=3, bucket_mb=SMALL_BUCKET_MB)


def full_bytes(engine: DataParallelEngine) -> list[int]:
    """What the full buffers of the blocks hold, and last those of all other units together."""

    def held(unit: Unit) -> int:
        return sum(flat.full.untyped_storage().nbytes() for flat in unit.flats)

    blocks = [held(unit) for unit in engine.units if not unit.is_root]
    return [*blocks, sum(held(unit) for unit in engine.units if unit.is_root)]


def train_step(engine: DataParallelEngine) -> None:
    with engine.step():
        loss = engine.model(torch.ones(2, 4)).square().mean()
    with engine.backward():
        loss.backward()


def test_nothing_full_is_held_outside_compute() -> None:
    def fn(rank: int) -> list[list[int]]:
        engine = make_engine(Net())
        seen = []
        train_step(engine)
        seen.append(full_bytes(engine))
        with torch.no_grad():
            with engine.step():
                engine.model(torch.ones(2, 4))
            seen.append(full_bytes(engine))
            engine.model(torch.ones(2, 4))  # outside any step
            seen.append(full_bytes(engine))
        with engine.step():
            engine.model(torch.ones(2, 4))
        with engine.optimizer_view():
            seen.append(full_bytes(engine))
        return seen

    for seen in run_ranks(fn, 2):
        assert seen == [[0] * 4] * 4


def test_only_one_block_and_the_next_are_full_in_compute() -> None:
    most: list[int] = []

    def fn(rank: int) -> None:
        model = Net()
        engine = make_engine(model)
        for block in model.blocks:
            block.up.register_forward_hook(
                lambda *_: most.append(sum(map(bool, full_bytes(engine)[:3])))
            )
        for _ in range(3):
            train_step(engine)

    run_ranks(fn, 2)
    assert max(most) == 2


def test_parameters_show_shards_outside_compute() -> None:
    def fn(rank: int) -> tuple[int, int]:
        engine = make_engine(Net())
        train_step(engine)
        assert all(param.ndim == 1 for param in engine.model.parameters())
        held = sum(param.numel() for param in engine.model.parameters())
        return held, sum(slot.numel for flat in engine.flats for slot in flat.layout.slots)

    results = [result for result in run_ranks(fn, 3) if result is not None]
    assert sum(held for held, _ in results) == results[0][1]


@contextmanager
def recorded(engine: DataParallelEngine) -> Iterator[list[str]]:
    """Record unshards, waits and reshards of blocks that change something."""
    events: list[str] = []

    def watch(unit: Unit) -> None:
        begin, ensure, reshard = unit.begin_unshard, unit.ensure_full, unit.reshard

        def begin_unshard() -> None:
            if unit.is_resharded:
                events.append(f"unshard {unit.name[-1]}")
            begin()

        def ensure_full() -> None:
            was_full = unit.state in HERE
            ensure()
            if not was_full:
                events.append(f"use {unit.name[-1]}")

        def resharded(**options: bool) -> None:
            if unit.state in HERE:
                events.append(f"reshard {unit.name[-1]}")
            reshard(**options)

        unit.begin_unshard, unit.ensure_full, unit.reshard = begin_unshard, ensure_full, resharded  # type: ignore[method-assign]

    for unit in engine.units:
        if not unit.is_root:
            watch(unit)
    yield events


FIRST_STEP = """
unshard 0, use 0, reshard 0, unshard 1, use 1, reshard 1, unshard 2, use 2, reshard 2,
unshard 2, use 2, reshard 2, unshard 1, use 1, reshard 1, unshard 0, use 0, reshard 0
"""
LATER_STEP = """
unshard 0, use 0, unshard 1, reshard 0, use 1, unshard 2, reshard 1, use 2, reshard 2,
unshard 2, use 2, unshard 1, reshard 2, use 1, unshard 0, reshard 1, use 0, reshard 0
"""


def test_prefetches_follow_the_order_of_the_last_step() -> None:
    def fn(rank: int) -> tuple[str, str]:
        engine = make_engine(Net())
        engine._unsharder.reshard_all()  # type: ignore[union-attr]
        with recorded(engine) as events:
            train_step(engine)
            first = ", ".join(events)
            events.clear()
            train_step(engine)
            return first, ", ".join(events)

    for result in run_ranks(fn, 2):
        assert result is not None
        assert result == (
            FIRST_STEP.replace("\n", " ").strip(),
            LATER_STEP.replace("\n", " ").strip(),
        )


def test_exceptions_in_a_step_leave_nothing_open() -> None:
    def fn(rank: int) -> list[int]:
        model = Net()
        engine = make_engine(model)
        with suppress(ZeroDivisionError), torch.no_grad(), engine.step():
            model(torch.ones(2, 4))
            raise ZeroDivisionError
        with torch.no_grad(), engine.step():
            model(torch.ones(2, 4))
        return full_bytes(engine)

    assert run_ranks(fn, 2) == [[0] * 4] * 2


def test_hooks_go_with_the_engine() -> None:
    def fn(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = Net()
        engine = make_engine(model)
        train_step(engine)
        engine.detach(restore=True)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return model(torch.ones(1, 4)).detach()

    torch.manual_seed(0)
    expected = Net()(torch.ones(1, 4)).detach()
    for result in run_ranks(fn, 2):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_weights_at_hand_for_part_of_a_backward_go_again_and_what_was_here_stays() -> None:
    def fn(rank: int) -> tuple[list[bool], list[bool], list[bool], int]:
        model = Net()
        engine = make_engine(model)
        with engine.step():
            loss = engine.model(torch.ones(2, 4)).square().mean()
            engine.units[-1].ensure_full()
            before = [unit.state in HERE for unit in engine.units]
            with engine.at_hand(list(model.blocks[1].parameters())):
                inside = [unit.state in HERE for unit in engine.units]
                torch.autograd.grad(loss, model.blocks[1].up.weight, retain_graph=True)
            after = [unit.state in HERE for unit in engine.units]
        reductions = engine.collectives.traffic.snapshot().get("reduce_scatter")
        return before, inside, after, 0 if reductions is None else reductions.calls

    for before, inside, after, reductions in run_ranks(fn, 2):
        assert sum(inside) == sum(before) + 1
        assert after == before
        assert reductions == 0


def test_what_a_hook_wrote_to_memory_before_it_raised_is_the_weight_s() -> None:
    """The memory was held on to, and what lay there never came to the weights."""

    def fn(rank: int) -> tuple[Tensor, int]:
        torch.manual_seed(7)
        model = Net()
        engine = make_engine(model)
        with suppress(ValueError), engine.hook():
            next(model.parameters()).detach().numpy()[...] = 3
            raise ValueError
        num_lent = len(engine.shards.lent._lent)
        engine.detach(restore=True)
        return next(model.parameters()).detach().clone(), num_lent

    for weight, num_lent in run_ranks(fn, 2):
        assert num_lent == 0
        torch.testing.assert_close(weight, torch.full_like(weight, 3))
