"""One stage's part of a step: what it computes, what it sends, and how it names what is wrong."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.core.placeholders import Placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.skipped_blocks import BlockCall
from lightning_shard.pipeline_parallel.stage_run import Needed, Probe, StageRun, StepCutShort

NAMES = [f"blocks.{index}" for index in range(4)]
Call = Callable[..., Any]  # of a block: its index and its tensors


def stand_in() -> Placeholder:
    return Placeholder.of(torch.empty(0), (2, 3), "embed.weight")


def first_stage(stop: int = 2) -> StageRun:
    return StageRun(0, 0, stop, NAMES, needed=Needed((0,), 1))


def last_stage(*received: Tensor) -> StageRun:
    return StageRun(1, 2, 4, NAMES, needed=None, received=received or (torch.ones(2, 3),))


def called(run: StageRun | Probe) -> Call:
    """Return what calls a block, which doubles its first tensor; a skipped one looks like it."""

    def skipped(call: BlockCall) -> Any:
        return call.args[0].again()

    def double(x: Tensor, *others: Tensor) -> Tensor:
        return 2 * x

    return lambda index, *args: run.call(index, skipped, BlockCall(double, args, {}))


def run_through(run: StageRun | Probe, step: Callable[[Call], Any]) -> Any:
    call = called(run)
    return run.forward(lambda: step(call))


def full(x: Tensor) -> Callable[[Call], Tensor]:
    """Return a step that calls all blocks in order."""

    def step(call: Call) -> Tensor:
        y = x
        for index in range(4):
            y = call(index, y)
        return y.sum()

    return step


def test_the_first_stage_gives_out_what_the_next_block_is_called_with() -> None:
    run = first_stage()
    run_through(run, full(torch.ones(2, 3)))
    assert [one.tolist() for one in run.outputs] == [[[4.0] * 3] * 2]
    assert run.result is None


def test_the_last_stage_goes_on_from_what_it_has_received() -> None:
    received = torch.full((2, 3), 5.0, requires_grad=True)
    run = last_stage(received)
    run_through(run, full(stand_in()))
    assert run.result.item() == 4 * 5 * 6
    run.result.backward()
    assert torch.equal(run.inputs[0].grad, torch.full((2, 3), 4.0))


def test_code_that_catches_exceptions_does_not_see_where_a_stage_ends() -> None:
    def step(call: Call) -> None:
        with suppress(Exception):
            full(torch.ones(2, 3))(call)
        raise AssertionError("the step went on")

    run = first_stage()
    run_through(run, step)
    assert len(run.outputs) == 1
    assert not issubclass(StepCutShort, Exception)


def test_a_tensor_that_is_given_twice_is_received_once() -> None:
    """A tensor that is given twice was received twice."""
    run, one = last_stage(torch.ones(2, 3)), stand_in()

    def step(call: Call) -> Tensor:
        return call(3, call(2, one, one), one)

    run_through(run, step)
    assert torch.equal(run.result, torch.full((2, 3), 4.0))


def test_a_received_value_that_is_written_to_has_changed_for_autograd() -> None:
    """The previous stage may have saved it, where both are on one rank."""
    received = torch.ones(2, 3, requires_grad=True)
    version = received._version
    run, one = last_stage(received), stand_in()

    def step(call: Call) -> Tensor:
        call(2, one)
        return call(3, one.mul_(3))

    run_through(run, step)
    assert torch.equal(run.result, torch.full((2, 3), 6.0))
    assert received._version > version


def test_a_probe_says_what_a_stage_needs_and_runs_none_of_its_blocks() -> None:
    x, other = stand_in(), stand_in()

    def step(call: Call) -> None:
        call(0, x)
        call(1, x)
        call(2, other, torch.ones(2), x, other)
        raise AssertionError("the step went on")

    probe = Probe(2)
    run_through(probe, step)
    assert probe.needed == Needed(places=(0, 2), num_tensors=4)
    probe = Probe(2)
    run_through(probe, lambda call: call(0, x))
    assert probe.needed is None


ones = torch.ones(2, 3)
MISTAKES: list[tuple[Callable[[], StageRun], Callable[[Call], Any], str]] = [
    (first_stage, lambda call: ones, "Stage 0: .* without calling the block 'blocks.0'"),
    (first_stage, lambda call: call(0, ones), "Stage 0: .* without calling the block 'blocks.2'"),
    (last_stage, lambda call: call(0, stand_in()), "Stage 1: .* the block 'blocks.2'"),
    (
        first_stage,
        lambda call: call(3, ones),
        r"Stage 0: .* 'blocks.3' before the blocks of this stage \('blocks.0' to 'blocks.1'\)",
    ),
    (
        first_stage,
        lambda call: [call(0, ones), call(3, ones)],
        r"Stage 0: .* 'blocks.3' after the blocks of this stage \('blocks.0' to 'blocks.1'\)",
    ),
    (
        partial(first_stage, stop=1),
        lambda call: [call(0, ones), call(0, ones)],
        r"Stage 0: .* 'blocks.0' after the blocks of this stage \('blocks.0'\)",
    ),
    (
        last_stage,
        lambda call: [call(2, stand_in()), call(0, ones)],
        r"Stage 1: .* 'blocks.0' after the blocks of this stage \('blocks.2' to 'blocks.3'\)",
    ),
    (
        last_stage,
        lambda call: call(2, ones),
        "Stage 1: the block 'blocks.2' is called with 0 tensors of earlier stages, expected 1",
    ),
    (
        first_stage,
        lambda call: [call(0, ones), call(2, ones, ones)],
        "Stage 0: the block 'blocks.2' is called with 2 tensors, expected 1 as on the next stage",
    ),
    (
        first_stage,
        lambda call: call(0, stand_in()),
        "Register the module that computes what the blocks are called with before them.*"
        r"Stage 0: the arguments of 'blocks.0' holds a value of shape \(2, 3\) .* 'embed.weight'",
    ),
    (
        last_stage,
        lambda call: [call(2, stand_in()), call(3, stand_in())],
        "can be tied.*Stage 1: the arguments of 'blocks.3' holds .* 'embed.weight'",
    ),
    (
        last_stage,
        lambda call: [call(2, stand_in()), stand_in()],
        "Stage 1: the step's result holds .* 'embed.weight'",
    ),
]


@pytest.mark.parametrize(("make", "step", "message"), MISTAKES)
def test_mistakes_are_named_with_their_stage_and_block(
    make: Callable[[], StageRun], step: Callable[[Call], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_through(make(), step)


def test_a_write_after_the_forward_through_an_older_view_is_refused() -> None:
    one = stand_in()
    view, run = one[0], last_stage()
    run_through(run, lambda call: call(3, call(2, one)))
    message = r"Stage 1: what the block 'blocks\.2' was called with"
    with pytest.raises(ConfigError, match=message), run.known():
        view.mul_(2)
