"""What a strategy asks of each way in which ranks share one model.

    check                          before a run is set up
    split, attach, wrapped         the set-up: the model, then the engine, then who runs steps
    completed                      what a step returns
    before_backward, before_update what ranks compare
    hook_context, finish_copies    around the user's hooks
    share_state                    before a checkpoint
    restore                        the end of a run, and of a set-up that has failed
    described                      instead of all that: a dry run

A dimension is told what it may know of the run in a `RunView`; it knows neither the strategy nor
other dimensions. The first of a strategy's dimensions splits the full model, each other one what
those before it have left; restoring goes the other way. What the first does around a step is
outermost; one that has a step run in another way, as a pipeline does, is the last.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.core.mesh import Axis
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.planning.description import Description, Measure
from lightning_shard.strategies.dimensions.run_view import RunView
from lightning_shard.strategies.dimensions.step_runner import StepRunner
from lightning_shard.strategies.trainer.same_results import SameResults


class ParallelDimension:
    """What the ranks along one axis of the mesh share; here they do nothing about it.

    Args:
        size: Number of ranks along the axis; None for all of the world.

    Attributes:
        axis: Axis of the mesh along which the ranks lie.
        averages_gradients: Whether its ranks have the same parameters and other parts of the
            samples, so that gradients are averaged over them, as over the ranks of other samples.
            Else each has parameters, or parts of them, that the others have not.
        has_own_samples: Whether its ranks are given different samples, as data-parallel ranks are,
            and average the gradients of what they all have; other parameters are shared out.
        num_parts: Number of parts that a batch is run in, while a run lasts.
    """

    axis: ClassVar[Axis]
    averages_gradients: ClassVar[bool] = False
    has_own_samples: ClassVar[bool] = False
    _same_results: SameResults | None = None  # of ranks whose losses must be equal

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.num_parts = 1

    def check(self, run: RunView) -> None:
        """Refuse what cannot be, before anything is changed; there are no groups yet.

        Raises:
            ConfigError: The module, or what the user asks for besides, does not go with this.
        """

    def brings_model(self, run: RunView) -> bool:
        """Whether `split` brings to this rank's device what belongs there, and no more."""
        return False

    def split(self, run: RunView) -> ModelSplit | None:
        """Take off the model what other ranks have; each rank must call.

        Returns:
            How the parameters that are here make up full ones; None where nothing is split.
        """
        return None

    def attach(self, engine: DataParallelEngine) -> None:
        """Work with the engine of the model that has been split."""

    def wrapped(self, runner: StepRunner) -> StepRunner:
        """Return who runs the steps: what does more around `runner`, or stands in its place."""
        return runner

    def completed(self, result: Any) -> Any:
        """Return what a step has returned as code that runs on one rank only can take it."""
        return result

    def before_backward(self, loss: Tensor) -> None:
        """See the loss of which a backward begins, and compare it; each rank must call."""
        same = self._same_results
        if same is not None and loss.numel() == 1 and same.is_due("loss"):
            same.check_loss(loss)

    def before_update(self, optimizer: Optimizer, number: int) -> None:
        """See the averaged gradients of an optimizer, `number` among them; each rank must call."""

    def check_gather(self, tensor: Tensor, *, sync_grads: bool) -> None:
        """Refuse to gather what a step has on its ranks, where that cannot be right.

        Raises:
            ConfigError: A gather would compare parts of a batch only; it says what to do.
        """

    def hook_context(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what makes the context of each of the user's hooks in a fit; None for none."""
        return None

    def follow(self) -> Mapping[Tensor, Callable[[], Tensor]]:
        """Return what brings tensors that other ranks' steps change up to date in a hook."""
        return {}

    def finish_copies(self) -> None:
        """Make plain modules of the copies that a hook has made of modules with full weights."""

    def forget_activations(self) -> None:
        """Let go of activations that layers keep between two calls."""

    def share_state(self) -> None:
        """Bring what a checkpoint takes from this rank up to date; each rank must call."""

    @property
    def random_state(self) -> Any:
        """What its own random numbers come from, for a checkpoint; None for none."""
        return None

    @random_state.setter
    def random_state(self, state: Any) -> None:
        """Draw what a run would have drawn that has saved its state."""

    def restore(self, *, full: bool) -> None:
        """Undo `split` and `attach`, as far as they have come; with `full` each rank must call."""

    @property
    def held_besides(self) -> Sequence[str]:
        """Names of what each rank of a fit holds besides what a dry run can know."""
        return ()

    def described(
        self, found: Description, module: "pl.LightningModule", measure: Measure
    ) -> Description:
        """Return the description of a world that is not there, with what this does in it.

        Args:
            found: The description so far, with the mesh.
            module: As for `split`, but its parameters may be on meta.
            measure: Measures the blocks of the module.
        """
        return found
