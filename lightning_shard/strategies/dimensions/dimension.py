"""What a strategy asks of each way in which ranks share one model.

    check                          before a run is set up
    split, attach, runner          the set-up: the model, then the engine, then who runs steps
    step_context                   around a step
    before_backward, before_update what ranks compare
    around_hook, finish_copies     around the user's hooks
    share_state                    before a checkpoint
    restore                        the end of a run, and of a set-up that has failed
    described, simulated           instead of all that: a dry run

A dimension is told what it may know of the run in a `RunView`; it knows neither the strategy nor
other dimensions. The first of a strategy's dimensions splits the full model, each other one what
those before it have left; restoring goes the other way. What the first does around a step is
outermost; one that has a step run in another way, as a pipeline does, is the last.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import Axis, ParallelMesh
from lightning_shard.core.options import Options
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.start import MetaStart
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.planning.description import Description, Measure, Simulated
from lightning_shard.strategies.trainer.same_on_ranks import SameResults
from lightning_shard.strategies.trainer.shared_values import Logged


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A strategy's run, as its dimensions see it.

    Attributes:
        module: The user's LightningModule.
        model: What is trained: the module, or what a wrapper has made of it.
        layer_sync: How batch norms are to be synchronized, where the user asks for it.
        matches_tags: Whether the backend tells messages of one rank apart by their tags.
        groups: This rank's group along each axis of a dimension; there once groups are made.
        of_parts: The ranks that have the same parts of what a dimension with samples of its own
            shares out, and second groups of them for gradients; None without such a dimension.
        of_forwards: Groups of ranks with samples of their own that need each other in a forward.
        with_shards: Inside, weights are the shards that are here, also within a hook.
        in_hook: Inside, code sees weights as hooks do; each rank must enter.
        drawn_for_own_data: Inside, ranks that are given different samples draw random numbers of
            their own.
        loss_scale: Returns what a loss scaler multiplies losses with, shape () if a tensor.
        completed: Makes what a step has returned what any code can take.
        forget_activations: Lets go of activations that the layers of any dimension keep.
        start: Knows the values of parameters on meta; None where there are none.
        in_order: Follows the microbatches of batches, where bits do not depend on ranks.
    """

    module: "pl.LightningModule"
    model: nn.Module
    mesh: ParallelMesh
    rank: int
    device: torch.device
    is_fitting: bool
    layer_sync: LayerSync | None
    matches_tags: bool
    groups: Mapping[Axis, Collectives] = field(default_factory=dict)
    of_parts: tuple[DataGroups, DataGroups] | None = None
    of_forwards: Sequence[Collectives] = ()
    with_shards: Callable[[], AbstractContextManager[object]] = nullcontext
    in_hook: MakesContext = nullcontext
    drawn_for_own_data: MakesContext = nullcontext
    loss_scale: Callable[[], Tensor | float]
    completed: Callable[[Any], Any]
    forget_activations: Callable[[], None]
    start: MetaStart | None = None
    in_order: "MicrobatchesInOrder | None" = None


class MicrobatchesInOrder(Protocol):
    """Follows the microbatches of a batch, so that bits do not depend on which ranks have them."""

    def begin_microbatch(self, index: int) -> None:
        """Begin random numbers anew with a microbatch of the present batch."""

    def logging(self, values: Sequence[Logged]) -> AbstractContextManager[None]:
        """Inside, a value is logged that is the mean of these, each with its number of samples."""


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """A rank's groups in a run whose ranks share models.

    Attributes:
        samples: Ranks that are given other samples: for loaders, random numbers, metrics, logged
            and gathered values.
        gradients: Ranks with the same parameters and other activations: those of `samples`, and
            those that compute other parts of one sample. For engines, state and batch norms.
        model: Ranks that share one model and are given the same samples: all axes together.
        of_parts: Ranks of `gradients` that have the same parts of what is shared out, such as
            experts, and second groups of them; None where nothing is.
        along: Those that share it along one axis.
    """

    samples: Collectives
    gradients: DataGroups
    model: Collectives
    along: Mapping[Axis, Collectives]
    of_parts: tuple[DataGroups, DataGroups] | None = None


StepKind = Literal["training", "validation", "test", "predict"]
ModuleStep = Callable[..., Any]
"""Runs the module's step of a kind, in its precision; the first argument is the batch."""


class StepRunner(Protocol):
    """Runs the steps of a run, one for each batch."""

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one step within one of the engine; each rank must call."""


class PlainRunner:
    """Runs a step once, on the batch as it is."""

    def __init__(
        self,
        engine_step: MakesContext,
        around_training: MakesContext = nullcontext,
    ) -> None:
        self._engine_step, self._around_training = engine_step, around_training

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one step; see `StepRunner`."""
        around = self._around_training() if kind == "training" else nullcontext()
        with around, self._engine_step():
            return step(*args, **kwargs)


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
        waits_in_backward: Whether its ranks wait for each other in a backward, once it has split.
    """

    axis: ClassVar[Axis]
    averages_gradients: ClassVar[bool] = False
    has_own_samples: ClassVar[bool] = False
    waits_in_backward = False
    _same_results: SameResults | None = None  # of ranks whose losses must be equal

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.num_parts = 1

    def check_copies(self, copies: tuple[int, int]) -> None:
        """Refuse that ranks keep several copies of the state, each in shards on so many of them."""

    def check(self, run: RunView) -> None:
        """Refuse what cannot be, before anything is changed; there are no groups yet."""

    def brings_model(self, run: RunView) -> bool:
        """Whether `split` brings to this rank's device what belongs there, and no more."""
        return False

    def split(self, run: RunView) -> ModelSplit | None:
        """Take off the model what other ranks have, and say how parts are full; each must call."""
        return None

    def attach(self, engine: DataParallelEngine) -> None:
        """Work with the engine of the model that has been split."""

    def backward_context(self) -> MakesContext | None:
        """Return what makes the context of each backward without hooks, once split."""
        return None

    def step_context(self) -> MakesContext | None:
        """Return what makes the context of each step of the module's, or None, once attached."""
        return None

    def runner(self, inner: StepRunner) -> StepRunner:
        """Return who runs the steps: `inner`, or what runs them in another way."""
        return inner

    def before_backward(self, loss: Tensor) -> None:
        """See the loss of which a backward begins, and compare it; each rank must call."""
        same = self._same_results
        if same is not None and loss.numel() == 1 and same.is_due("loss"):
            same.check_loss(loss)

    def before_update(self, optimizer: Optimizer, number: int) -> None:
        """See the averaged gradients of an optimizer, `number` among them; each rank must call."""

    def check_gather(self, tensor: Tensor, *, sync_grads: bool) -> None:
        """Refuse to gather what a step has on its ranks, where that cannot be right."""

    def around_hook(self) -> AbstractContextManager[None]:
        """Make the context of a hook of the user's in a fit."""
        return nullcontext()

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
        """Return a world's description with what this does in it; parameters may be on meta."""
        return found

    def simulated(self, model: nn.Module, found: Description, group: Collectives) -> Simulated:
        """Change a model without elements as `split` and `attach` do one that trains."""
        return Simulated()


@dataclass(frozen=True, kw_only=True)
class DimensionOptions(Options):
    """The options of a dimension."""

    def dimension(self) -> ParallelDimension:
        """Return the dimension that these options ask for."""
        raise NotImplementedError

    def dimensions(self) -> list[ParallelDimension]:
        """Return that of each group among the bases; the first splits the full model."""
        groups: list[Any] = [one for one in type(self).__mro__ if "dimension" in vars(one)]
        return [one.dimension(self) for one in groups if one is not DimensionOptions]
