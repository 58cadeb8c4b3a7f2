"""Expert parallel as a dimension: whole experts on each rank, ranks with samples of their own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.options import AxisSize
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.leftovers import refuse_leftover_shards
from lightning_shard.data_parallel.memory.quantised import refuse_quantised_parts
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.finding import Mixture, check_mixtures, find_mixtures
from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.expert_parallel.shared_experts import SharedExperts
from lightning_shard.expert_parallel.split import ExpertSplit
from lightning_shard.planning.description import Description, Simulated
from lightning_shard.planning.simulated_model import SimulatedCollectives
from lightning_shard.strategies.dimensions.dimension import (
    DimensionOptions,
    ParallelDimension,
    RunView,
)
from lightning_shard.tensor_parallel.full_view import ViewsOfKeptParameters


class ExpertDimension(ParallelDimension):
    """Each rank has some of every mixture's experts, and all other parameters."""

    axis = "ep"
    averages_gradients = True
    has_own_samples = True

    def __init__(self, size: int | None = 1) -> None:
        super().__init__(size)
        self._run: RunView | None = None
        self._mixtures: list[Mixture] = []
        self._split: ExpertSplit | None = None
        self._shared: SharedExperts | None = None
        self._kept: ViewsOfKeptParameters | None = None
        self._last_load: Mapping[str, ExpertLoad] = {}

    @override
    def check_copies(self, copies: tuple[int, int]) -> None:
        if self.size != 1:
            raise ConfigError(
                f"data_parallel_size={copies} makes several copies of the state, but with "
                f"expert_parallel_size={self.size} experts and other parameters are on different "
                f"ranks; expected a number. Leave the pair out."
            )

    @override
    def check(self, run: RunView) -> None:
        num_ranks = run.mesh.size(self.axis)
        if num_ranks > 1:
            check_mixtures(find_mixtures(run.model), run.model, num_ranks)

    @override
    def split(self, run: RunView) -> ModelSplit | None:
        group = run.groups[self.axis]
        if group.size == 1:
            return None
        refuse_leftover_shards(run.model)
        refuse_quantised_parts(run.model, run.rank, "expert parallel")
        check_same_model(run.model, group)
        assert run.of_parts is not None
        self._run, self._mixtures = run, find_mixtures(run.model)
        self._split = ExpertSplit(run.model, self._mixtures, group, *run.of_parts, run.start)
        return self._split

    @override
    def attach(self, engine: DataParallelEngine) -> None:
        if self._split is not None:
            assert self._run is not None
            self._kept = ViewsOfKeptParameters(self._run.model)
            self._shared = SharedExperts(
                self._mixtures,
                self._split,
                self._run.with_shards,
                in_pipeline=self._run.mesh.pp > 1,
                counts=self._run.mesh.size("cp") == 1 or self._run.groups["cp"].rank == 0,
            )

    @override
    def backward_context(self) -> MakesContext | None:
        return None if self._split is None else self._in_step

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Inside, weights of experts look full to all code but the experts' own."""
        if self._shared is None or self._kept is None:
            yield
            return
        with self._shared.weights.step(), self._kept.shown():
            yield

    @override
    def step_context(self) -> MakesContext:
        return self._in_step

    @override
    def around_hook(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shared is None else self._shared.weights.step(in_hook=True)

    @property
    @override
    def held_besides(self) -> Sequence[str]:
        return () if self.size == 1 else ("tokens beyond an even share of the experts",)

    @override
    def simulated(self, model: nn.Module, found: Description, group: Collectives) -> Simulated:
        # Which experts tokens go to is known from their elements alone: the first rank's here get
        # its own and its peers'.
        data = DataGroups.of(SimulatedCollectives(0, found.num_averaging // group.size))
        mixtures = find_mixtures(model)
        check_mixtures(mixtures, model, group.size)
        split = ExpertSplit(model, mixtures, group, data, data)
        SharedExperts(mixtures, split, nullcontext, is_dry=True, tries=False)
        return Simulated(split=split)

    def load(self) -> Mapping[str, ExpertLoad]:
        """Return by name how the tokens of each mixture were shared out; each rank must call."""
        if self._shared is None or self._run is None or self._run.of_parts is None:
            return self._last_load
        others = [self._run.of_parts[0].dp, *filter(None, [self._run.groups.get("pp")])]
        return self._shared.load([one for one in others if one.size > 1])

    @override
    def restore(self, *, full: bool) -> None:
        if self._shared is not None:
            self._last_load = self.load() if full else {}
            self._shared.restore()
        if self._split is not None:
            self._split.restore(full=full)
        self._split = self._shared = self._run = None
        self._mixtures = []


@dataclass(frozen=True, kw_only=True)
class ExpertAxis(DimensionOptions):
    """What expert parallelism takes.

    Attributes:
        expert_parallel_size: Ranks that share the experts of every mixture, whose number it
            divides, and train on different batches: the mesh's axis "ep".
    """

    expert_parallel_size: AxisSize = 1

    @override
    def dimension(self) -> ParallelDimension:
        return ExpertDimension(self.expert_parallel_size)
