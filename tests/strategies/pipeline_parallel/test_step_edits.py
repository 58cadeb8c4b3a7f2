"""What a training step edits is edited once per batch, as on one device, or refused by name."""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_shard import ConfigError, HybridParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import Block, Fitted, Stack, fit, pipeline

pytestmark = ignoring("A step uses .* parameters outside of their stage")

SLOW = pytest.mark.slow
Edit = Callable[[Any, Any], object]
LIMIT = 0.1


class Edited(Stack):
    """Its step edits something before the network, or after it."""

    before: ClassVar[Edit | None] = None
    after: ClassVar[Edit | None] = None
    first_batch: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("codebook", torch.zeros(100))
        self.steps, self.samples, self.total, self.last = 0, 0, 0.0, torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        edits = type(self).before, type(self).after
        if edits[0] and batch_idx >= self.first_batch:
            edits[0](self, batch)
        loss = self.loss(batch)
        if edits[1] and batch_idx >= self.first_batch:
            edits[1](self, loss)
        return loss


def style(**attributes: Any) -> type[Edited]:
    return type("Style", (Edited,), attributes)


@cache
def alone(before: Edit | None, after: Edit | None, accumulate: int = 1) -> Fitted:
    made = style(before=before, after=after)
    return fit(made, max_epochs=1, accumulate_grad_batches=accumulate)


def assert_equal(one: Fitted, other: Fitted) -> None:
    torch.testing.assert_close(one.curve.losses, other.curve.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-5, atol=2e-7)


def clip(module: Any, _: Any) -> None:
    for param in module.parameters():
        param.data.clamp_(-LIMIT, LIMIT)


def assign(module: Any, _: Any) -> None:
    for param in module.parameters():
        param.data = param.data * 0.9


@torch.no_grad()
def decay(module: Any, _: Any) -> None:
    for param in module.parameters():
        param.mul_(0.9)


@torch.no_grad()
def decay_together(module: Any, _: Any) -> None:
    torch._foreach_mul_(list(module.parameters()), 0.9)


def load(module: Any, _: Any) -> None:
    state = module.state_dict()
    module.load_state_dict({name: state[name] * 0.9 for name in state})


def of_first_stage(module: Any, _: Any) -> None:
    module.embed.weight.data.mul_(0.9)


def assign_to_first_stage(module: Any, _: Any) -> None:
    module.embed.weight.data = module.embed.weight.data * 0.9


def of_last_stage(module: Any, _: Any) -> None:
    module.head.weight.data.mul_(0.9)


def as_an_array(module: Any, _: Any) -> None:
    module.head.weight.detach().numpy()[:] *= 0.9


def halve_gradients(module: Any, _: Any) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def assign_gradients(module: Any, _: Any) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


# --- parameters --------------------------------------------------------------------------------


def test_clipping_weights_after_the_network_is_refused() -> None:
    """Weights clipped after the network were so on the last stage alone."""
    with pytest.raises(ConfigError, match=r"hook that .*on_train_batch_end.* after the last block"):
        fit(style(after=clip), pipeline(2, "1f1b"), max_epochs=1)


@pytest.mark.slow
def test_weights_clipped_before_the_network_are_those_of_one_device() -> None:
    assert_equal(fit(style(before=clip), pipeline(2, "1f1b"), max_epochs=1), alone(clip, None))


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(assign, marks=SLOW),
        decay,
        *(pytest.param(one, marks=SLOW) for one in (decay_together, load)),
    ],
)
def test_changes_of_weights_in_each_microbatch_are_refused(edit: Edit) -> None:
    """Weights were changed again by each microbatch."""
    with pytest.raises(ConfigError, match=r"changes .* again in each microbatch"):
        fit(style(before=edit), pipeline(2, "1f1b"), max_epochs=1)


@SLOW
@pytest.mark.parametrize(
    "edit", [of_first_stage, assign_to_first_stage, of_last_stage, as_an_array]
)
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.filterwarnings("ignore:1 microbatches are fewer than the 2 stages")
def test_an_edit_after_the_network_of_any_stage_is_refused(
    edit: Edit, num_microbatches: int
) -> None:
    stages = pipeline(2, "1f1b", num_microbatches=num_microbatches)
    with pytest.raises(ConfigError, match=r"(embed|head)\.weight' after the last block"):
        fit(style(after=edit), stages, max_epochs=1)


@pytest.mark.parametrize("edits", [pytest.param({"after": clip}, marks=SLOW), {"before": assign}])
def test_edits_that_begin_after_the_first_batch_are_refused(edits: dict[str, Edit]) -> None:
    """Edits that begin after the first batch were not seen."""
    with pytest.raises(ConfigError, match="Edit parameters and gradients in a hook"):
        fit(style(first_batch=2, **edits), pipeline(2, "1f1b"), max_epochs=1)


@SLOW
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("edits", [{"after": clip}, {"before": assign}])
def test_edits_in_pipelines_side_by_side(zero_stage: int, edits: dict[str, Edit]) -> None:
    stages = HybridParallelStrategy(
        backend="in_process", num_ranks=4, pipeline_parallel_size=2, zero_stage=zero_stage
    )
    with pytest.raises(ConfigError, match="Edit parameters and gradients in a hook"):
        fit(style(**edits), stages, max_epochs=1, use_distributed_sampler=True)


@SLOW
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_edits_of_several_stages_on_one_rank(schedule: str) -> None:
    staged = fit(style(before=clip), pipeline(2, schedule), max_epochs=1)
    assert_equal(staged, alone(clip, None))
    with pytest.raises(ConfigError, match="after the last block"):
        fit(style(after=of_first_stage), pipeline(2, schedule), max_epochs=1)


def penalize_and_clip(module: Any, loss: Tensor) -> None:
    loss += 1e-3 * module.embed.weight.square().sum()  # which the last stage borrows
    clip(module.embed, None)


@SLOW
def test_an_edit_of_a_borrowed_weight_is_refused() -> None:
    """An edit of a borrowed weight was lost."""
    with pytest.raises(ConfigError, match="parameters of other stages that it has borrowed"):
        fit(style(after=penalize_and_clip), pipeline(2, "1f1b"), max_epochs=1)


class Renormalized(Stack):
    """Rows of a block's weight have at most norm 0.3, which its forward sees to."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            weight = self.layer.weight
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.3)
            return super().forward(x)


@SLOW
def test_a_constraint_in_a_blocks_forward_is_that_of_one_device() -> None:
    staged = fit(Renormalized, pipeline(2, "1f1b"), max_epochs=1)
    assert_equal(staged, fit(Renormalized, max_epochs=1))


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x * 2


class Parametrized(Edited):
    """The step assigns to a parametrized weight, through its right inverse."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.head, "weight", Halved())

    @staticmethod
    def after(module: Any, _: Any) -> None:
        module.head.weight = module.head.weight * 0.9


@SLOW
def test_a_weight_assigned_through_its_right_inverse_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight\.original' after the last block"):
        fit(Parametrized, pipeline(2, "1f1b"), max_epochs=1)


class InHooks(Stack):
    def on_train_batch_end(self, *_: Any) -> None:
        clip(self, None)


def test_weights_clipped_in_a_hook_are_those_of_one_device() -> None:
    assert_equal(fit(InHooks, pipeline(2, "1f1b"), max_epochs=1), fit(InHooks, max_epochs=1))


# --- gradients ---------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("edit", [halve_gradients, assign_gradients])
@pytest.mark.parametrize("where", ["before", "after"])
def test_gradients_are_edited_once_per_batch(edit: Edit, where: str) -> None:
    """Gradients were edited by each microbatch."""
    edits = {where: edit}
    staged = fit(style(**edits), pipeline(2, "1f1b"), max_epochs=1)  # zeroed before backward
    assert_equal(staged, alone(edits.get("before"), edits.get("after")))
    with pytest.raises(ConfigError, match="gradients that are being accumulated"):
        fit(style(**edits), pipeline(2, "1f1b"), max_epochs=1, accumulate_grad_batches=2)


# --- numbers, buffers, options -----------------------------------------------------------------


def freeze_at_times(module: Any, _: Any) -> None:
    for param in module.parameters():
        param.requires_grad_(not param.requires_grad)


def test_layers_that_are_frozen_in_a_step_are_refused() -> None:
    """Layers frozen in a step ended in a mismatch of messages."""
    with pytest.raises(ConfigError, match="freezes or unfreezes parameters"):
        fit(style(before=freeze_at_times), pipeline(2, "1f1b"), max_epochs=1)


def slow_down(module: Any, _: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.9


def follow_step(module: Any, _: Any) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] = 0.1 / (1 + module.global_step)


@pytest.mark.parametrize(
    "edits",
    [
        {"after": slow_down},
        pytest.param({"before": slow_down}, marks=SLOW),
        pytest.param({"after": follow_step}, marks=SLOW),
    ],
)
def test_the_learning_rate_is_changed_on_every_stage(edits: dict[str, Edit]) -> None:
    """The learning rate was changed on the last stage alone."""
    staged = fit(style(**edits), pipeline(2, "1f1b"), max_epochs=1)
    assert_equal(staged, alone(edits.get("before"), edits.get("after")))


def keep(module: Any, loss: Tensor) -> None:
    module.steps += 1
    module.total += loss.item()
    module.last = loss.detach()
    module.average.mul_(0.9).add_(0.1 * loss.detach())


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=SLOW)])
def test_a_counter_counts_batches_and_an_average_stays(schedule: str) -> None:
    """A counter counted microbatches and an average was lost."""
    with pytest.warns(UserWarning, match=r"A step changes self\.average .* a mean over samples"):
        staged = fit(style(after=keep), pipeline(2, schedule), max_epochs=1)
    one = alone(None, keep)
    assert_equal(staged, one)  # with the buffer
    assert staged.model.steps == one.model.steps
    assert staged.model.total == pytest.approx(one.model.total, rel=1e-5)
    torch.testing.assert_close(staged.model.last, one.model.last)


def count_in_forward(module: Any, batch: Any) -> None:
    module.steps += 1
    module.samples += len(batch[1])


@SLOW
def test_samples_are_counted_and_steps_are() -> None:
    staged = fit(style(before=count_in_forward), pipeline(2, "1f1b"), max_epochs=1)
    one = alone(count_in_forward, None)
    assert (staged.model.steps, staged.model.samples) == (one.model.steps, one.model.samples)


def write_codebook(module: Any, loss: Tensor) -> None:
    module.codebook[0] += loss.detach()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=SLOW)])
def test_changing_a_buffer_of_the_first_stage_on_the_last_is_refused(schedule: str) -> None:
    """A buffer of the first stage was changed on the last alone."""
    with pytest.raises(ConfigError, match="changes 'codebook' on the last stage"):
        fit(style(after=write_codebook), pipeline(2, schedule), max_epochs=1)
