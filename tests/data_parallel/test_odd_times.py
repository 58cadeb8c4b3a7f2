"""Gradients that are frozen, zeroed, set or recorded at odd times are those of a single device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks, engine_of

NUM_RANKS = 2
UNIT_BY_UNIT = 1e-5  # a bucket for each layer
Backward = Callable[..., None]
Script = Callable[[nn.Sequential, SGD, Backward], Any]


def build() -> tuple[nn.Sequential, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[1].register_parameter("spare", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model.register_parameter("loose", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(number: int) -> list[Tensor]:
    """Return a batch of each rank's."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(5, 3, generator=generator).double() for _ in range(NUM_RANKS)]


def loss_of(model: nn.Sequential, batch: Tensor, *, uses_loose: bool) -> Tensor:
    loss = model(batch).square().mean()
    loose: Any = model.loose
    return loss + (loose * batch.mean(0)).square().sum() if uses_loose else loss


def alone(script: Script) -> tuple[dict[str, Tensor], Any]:
    """Run on one device, with the mean of the ranks' losses."""
    model, optimizer = build()

    def backward(number: int, *, loose_on: int = -1, **options: Any) -> None:
        del options
        losses = [
            loss_of(model, batch, uses_loose=rank == loose_on)
            for rank, batch in enumerate(batches(number))
        ]
        (sum(losses) / NUM_RANKS).backward()  # type: ignore[union-attr]

    found = script(model, optimizer, backward)
    return model.state_dict(), found


def on_ranks(
    script: Script, stage: int, *, expects_edits: bool = False
) -> tuple[dict[str, Tensor], Any]:
    """Run on several ranks; return the first one's weights."""

    def fn(rank: int) -> tuple[dict[str, Tensor], Any]:
        ranks = all_ranks()
        model, optimizer = build()
        options = EngineOptions(stage=stage, bucket_mb=UNIT_BY_UNIT, expects_edits=expects_edits)
        engine = DataParallelEngine(model, ranks, options)
        sharded = ShardedOptimizer(optimizer, engine)

        def backward(
            number: int,
            *,
            syncs: bool = True,
            create_graph: bool = False,
            loose_on: int = -1,
            by_hand: bool = False,
        ) -> None:
            with engine.step():
                loss = loss_of(model, batches(number)[rank], uses_loose=rank == loose_on)
                if by_hand:  # as a pipeline does, which adds microbatches up itself
                    used = [param for name, param in model.named_parameters() if "." in name]
                    used = [param for param in used if param.shape != (3,)]
                    with engine.backward():
                        for param, grad in zip(used, torch.autograd.grad(loss, used), strict=True):
                            engine.take_gradient(param, grad)
                    return
                if syncs:
                    with engine.backward():
                        loss.backward(create_graph=create_graph)
                    return
                with engine.no_sync(), engine.backward():
                    loss.backward()

        found = script(model, optimizer, backward)
        sharded.detach()
        engine.detach(restore=True)
        return {name: value.clone() for name, value in model.state_dict().items()}, found

    result = run_ranks(fn, NUM_RANKS)[0]
    assert result is not None
    return result


def assert_as_alone(script: Script, stage: int, *, expects_edits: bool = False) -> None:
    got, _ = on_ranks(script, stage, expects_edits=expects_edits)
    expected, _ = alone(script)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", range(4))
def test_a_layer_that_is_frozen_after_a_step_leaves_the_updates(stage: int) -> None:
    """Its old gradient came back, since no reduction asked whether it had been zeroed."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        backward(0)
        optimizer.step()
        model[1].requires_grad_(False)
        for number in (1, 2):
            optimizer.zero_grad()
            backward(number)
            optimizer.step()

    assert_as_alone(script, stage)


@pytest.mark.parametrize("stage", range(4))
def test_a_layer_that_is_trained_in_turns_gets_no_gradients_of_its_last_turn(stage: int) -> None:
    """A layer that is trained in turns got the gradients of its last turn."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        for number in range(4):
            model[0].requires_grad_(number % 2 == 0)
            model[2].requires_grad_(number % 2 == 1)
            backward(number)
            optimizer.step()
            optimizer.zero_grad()

    assert_as_alone(script, stage)


@pytest.mark.parametrize("stage", range(4))
def test_what_was_accumulated_before_a_layer_is_frozen_counts(stage: int) -> None:
    """What was accumulated before a layer was frozen was lost."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        backward(0, syncs=False)
        model[1].requires_grad_(False)
        backward(1)
        optimizer.step()
        optimizer.zero_grad()
        backward(2)
        optimizer.step()

    assert_as_alone(script, stage)


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_of_the_users_outlives_a_backward_that_adds_nothing_to_it(stage: int) -> None:
    """A gradient of the users was lost in a backward that adds nothing to it."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        spare: Any = model[1].spare
        spare.grad = torch.full_like(spare, 2.0)
        backward(0)
        optimizer.step()

    assert_as_alone(script, stage)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_backwards_that_create_graphs_hold_none_of_them(stage: int, set_to_none: bool) -> None:
    """Each graph hung on the one before it; zero_grad(set_to_none=False) raised."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> list[bool]:
        has_graph = []
        for number in range(3):
            backward(2 * number, create_graph=True)
            backward(2 * number + 1, create_graph=True)
            with torch._C.DisableTorchFunctionSubclass():
                grads = [param.grad for param in model.parameters()]
                has_graph += [grad is not None and grad.requires_grad for grad in grads]
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return has_graph

    (got, has_graph), (expected, _) = on_ranks(script, stage), alone(script)
    assert not any(has_graph)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def doubled_in_place(params: list[Any]) -> None:
    for param in params:
        param.grad.mul_(2)


def doubled_in_a_new_tensor(params: list[Any]) -> None:
    for param in params:
        param.grad = param.grad * 2


def doubled_together(params: list[Any]) -> None:
    torch._foreach_mul_([param.grad for param in params], 2)


def halve(param: Any) -> None:
    param.grad.mul_(0.5)


def clipped(params: list[Any]) -> None:
    nn.utils.clip_grad_norm_(params, 0.1)


@pytest.mark.parametrize(
    "edit", [doubled_in_place, doubled_in_a_new_tensor, doubled_together, clipped]
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_edit_between_micro_batches_reaches_what_a_rank_has_not_used(
    stage: int, set_to_none: bool, edit: Callable[[list[Any]], None]
) -> None:
    """Under stage 1 its .grad was None on that rank, which edited the others' shards alone."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        loose: Any = model.loose
        params = [loose, *(param for param in model.parameters() if param is not loose)]
        for number in range(3):
            backward(3 * number, syncs=False, loose_on=number - 1)
            edit([param for param in params if param.grad is not None])
            backward(3 * number + 1, syncs=False)
            edit([param for param in params if param.grad is not None])
            backward(3 * number + 2, loose_on=2 - number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    assert_as_alone(script, stage, expects_edits=True)


def test_gradients_that_nobody_expects_to_be_met_are_refused_where_ranks_differ() -> None:
    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        del optimizer
        backward(0, syncs=False, loose_on=1)
        clipped([param for param in model.parameters() if param.grad is not None])

    with pytest.raises(ConfigError, match="others have not used it yet"):
        on_ranks(script, stage=1)


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("stage", range(3))
def test_a_gradient_of_a_pipeline_adds_to_one_of_the_users(stage: int, syncs: bool) -> None:
    """Autograd's own pass adds to what stands in `.grad`; what a pipeline hands over did not."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        backward(0, syncs=syncs)
        bias: Any = model[1].bias
        bias.grad = torch.full_like(bias, 2.0)
        backward(1, by_hand=True)
        optimizer.step()

    assert_as_alone(script, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hook_that_waits_for_gradients_is_refused_in_the_middle_of_a_backward(stage: int) -> None:
    """The gradient that had just come was left out."""

    def fn(rank: int) -> None:
        model, _ = build()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        engine = engine_of(model, stage=stage)
        for number in range(2):
            with engine.step(), engine.backward():
                loss_of(model, batches(number)[rank], uses_loose=False).backward()

    with pytest.raises(ConfigError, match="middle of a backward"):
        run_ranks(fn, NUM_RANKS)


def test_a_hook_that_waits_for_gradients_is_refused_by_a_pipeline() -> None:
    """A hook that waits for gradients was not called by a pipeline."""

    def script(model: nn.Sequential, optimizer: SGD, backward: Backward) -> None:
        del optimizer
        weight: Any = model[2].weight
        weight.register_post_accumulate_grad_hook(print)
        backward(0, by_hand=True)

    with pytest.raises(ConfigError, match="which a pipeline would not call"):
        on_ranks(script, stage=0)
