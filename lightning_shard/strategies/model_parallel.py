"""Tensor, context and pipeline parallel as Lightning strategies, by themselves and on one mesh.

Their ranks have groups, and the same batches. Which hosts they are on is said when a run begins: a
mesh takes neighbouring ranks to share a host. Launchers number ranks host by host unless told
otherwise, and then ranks that share a layer are apart though the mesh looks as it should:

    mpirun --map-by slot, srun --distribution=block     hosts 0 0 1 1    tp groups 0 1 | 2 3
    mpirun --map-by node, srun --distribution=cyclic    hosts 0 1 0 1    each of them crosses
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import ALL_AXES, Axis, NodePlacement, ParallelMesh
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.deferred_init.start import MetaStart, noted_alike
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.dimensions.dimension import (
    ParallelDimension,
    RunGroups,
    RunView,
    WrappedRunner,
)
from lightning_shard.strategies.dimensions.experts import ExpertDimension
from lightning_shard.strategies.dimensions.pipeline import PipelineDimension
from lightning_shard.strategies.hybrid_sharding import (
    replicate_ranks,
    shard_ranks,
    shard_size,
    warning_of_unshards,
)
from lightning_shard.strategies.options import (
    ContextParallelOptions,
    HybridParallelOptions,
    PipelineParallelOptions,
    SplitOptions,
    TensorParallelOptions,
)
from lightning_shard.strategies.trainer._lightning import seed_workers
from lightning_shard.strategies.trainer.batch_counts import (
    agree_on_batches,
    check_same_lengths,
    lengths_on_ranks,
)
from lightning_shard.strategies.trainer.hook_advice import hooks_inside
from lightning_shard.strategies.trainer.same_on_ranks import SameBatches
from lightning_shard.strategies.trainer.step_collectives import MetricGroups, default_group_is
from lightning_shard.strategies.trainer.weight_averaging import averaging_callbacks
from lightning_shard.strategies.trainer.weights_in_hooks import WeightsInHooks
from lightning_shard.tensor_parallel.randomness import drawn_apart

_OF_FAILURES = ("on_exception",)  # hooks in which the other ranks may be elsewhere


def tell_placement(
    mesh: ParallelMesh, placement: NodePlacement, hosts: Sequence[int], *, announces: bool
) -> None:
    """Say which axes stay inside a host, and warn of groups that wait for the network.

    Args:
        mesh: The ranks of the run, on several hosts.
        placement: Where the ranks of its groups would lie if those of a host were neighbours.
        hosts: The host of each rank.
        announces: Whether to say what is no warning, too.
    """
    if not are_neighbours(hosts):
        rank_zero_warn(warning_of_scattered_ranks(mesh, hosts))
        return
    for warning in placement.warnings:
        rank_zero_warn(warning)
    if announces:
        rank_zero_info(f"{mesh!r} on {placement}")


def are_neighbours(hosts: Sequence[int]) -> bool:
    """Whether the ranks of each host follow each other; `hosts` has the host of each rank."""
    changes = sum(one != other for one, other in pairwise(hosts))
    return changes == len(set(hosts)) - 1


def warning_of_scattered_ranks(mesh: ParallelMesh, hosts: Sequence[int]) -> str:
    """Return what to say when the ranks of a host are not neighbours.

    Args:
        mesh: The ranks of the run.
        hosts: The host of each rank.
    """
    first = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == hosts[0])
    layers, copies = mesh.groups("tp"), [one for same in mesh.copies for one in same]
    told = [
        f"The mesh takes the ranks of a host to be neighbours, but rank 0's host has ranks {first}."
    ]
    if crossing := _num_crossing(layers, hosts):
        told.append(
            f"So {crossing} of {len(layers)} tp groups cross hosts, and every layer of theirs "
            "waits for the network between them."
        )
    if crossing := _num_crossing(copies, hosts):
        told.append(
            f"So {crossing} of {len(copies)} copies of the state cross hosts, and gathers wait for "
            "the network between them."
        )
    told.append(
        "Have the ranks numbered host by host: `mpirun --map-by slot` or "
        "`srun --distribution=block`."
    )
    return " ".join(told)


def _num_crossing(groups: Sequence[Sequence[int]], hosts: Sequence[int]) -> int:
    return sum(len({hosts[rank] for rank in group}) > 1 for group in groups)


class ModelParallelStrategy(DataParallelStrategy):
    """One model over the ranks of a group; what they leave of the world is data parallel.

    Args:
        dimensions: How ranks share the model. The first splits it first; one that runs steps in
            another way, as a pipeline does, comes last.
        zero_stage: How the ranks that average gradients keep their state, 0 to 3.
        **options: As for the other strategies: `backend`, `num_ranks`, `units` and so on.
    """

    _made: RunGroups | None = None
    _metrics: MetricGroups | None = None
    _same_batches: SameBatches | None = None
    _weights: WeightsInHooks | None = None  # as hooks see them, where they are split

    def __init__(
        self,
        dimensions: Sequence[ParallelDimension],
        *,
        zero_stage: int = 0,
        **options: Any,
    ) -> None:
        self.stage = zero_stage
        super().__init__(**options)
        self.dimensions = tuple(dimensions)

    @property
    @override
    def mesh_rank(self) -> int:
        return super().global_rank

    @property
    @override
    def mesh_size(self) -> int:
        return super().world_size

    @property
    @override
    def global_rank(self) -> int:
        """Number of this rank among those that are given other samples."""
        if self._made is not None:
            return self._made.samples.rank
        return self.mesh.peers(self._sample_axes, self.mesh_rank).index(self.mesh_rank)

    @property
    @override
    def world_size(self) -> int:
        """Number of ranks that are given other samples."""
        if self._made is not None:
            return self._made.samples.size
        return self.mesh.size(*self._sample_axes)

    @property
    @override
    def mesh(self) -> ParallelMesh:
        return ParallelMesh.of_world(self.mesh_size, **self._sizes())

    def _sizes(self) -> dict[str, Any]:
        """Return the number of ranks along the axis of each dimension, as the mesh takes them."""
        size = self.mesh_size
        own = {one.axis: size if one.size is None else one.size for one in self.dimensions}
        others = {axis: own.pop(axis) for axis in [*own] if axis not in ALL_AXES}
        return {**own, "others": others}

    @property
    def _axes(self) -> list[Axis]:
        """The axes of the dimensions."""
        return [one.axis for one in self.dimensions]

    @property
    def _groups(self) -> RunGroups:
        if self._made is None:
            raise ConfigError("There are no groups before trainer.fit (or validate ...) runs.")
        return self._made

    @property
    @override
    def data_collectives(self) -> Collectives:
        return self._groups.samples

    @property
    @override
    def gradient_groups(self) -> DataGroups:
        return self._groups.gradients

    @property
    def _gradient_axes(self) -> list[Axis]:
        """The axes whose ranks have the same parameters and average their gradients."""
        return ["dp", *(one.axis for one in self.dimensions if one.averages_gradients)]

    @property
    def _sample_axes(self) -> list[Axis]:
        """The axes whose ranks are given different samples."""
        return ["dp", *(one.axis for one in self.dimensions if one.has_own_samples)]

    @property
    @override
    def shard_size(self) -> int:
        """How many of the ranks that average gradients share out a copy of the state: here, all."""
        return self.mesh.size(*self._gradient_axes)

    @property
    def model_collectives(self) -> Collectives:
        """Collectives over the ranks that share one model."""
        return self._groups.model

    def along(self, axis: Axis) -> Collectives:
        """Return collectives over the ranks that share this model along one axis."""
        return self._groups.along[axis]

    @property
    def model_ranks(self) -> tuple[int, ...]:
        """The global ranks that share this rank's model, and are given the same samples."""
        return self.mesh.peers(self._model_axes, self.mesh_rank)

    @property
    def _model_axes(self) -> list[Axis]:
        """The axes whose ranks are given the same samples."""
        return [one.axis for one in self.dimensions if not one.has_own_samples]

    @override
    def _make_groups(self) -> None:
        if self.num_nodes > 1:
            hosts = self.collectives.all_gather_object(self.node_rank)
            placement = self.placement(self.num_processes)
            tell_placement(self.mesh, placement, hosts, announces=self._announces)
        peers = partial(self.mesh.peers, rank=self.mesh_rank)
        samples, averaging = self._group(peers(self._sample_axes)), peers(self._gradient_axes)
        is_more = len(averaging) > samples.size
        self._made = RunGroups(
            samples=samples,
            gradients=self._sharing_out(self._group(averaging) if is_more else samples, averaging),
            model=self._group(self.model_ranks),
            along={axis: self._group(peers(axis)) for axis in self._axes},
            of_parts=self._of_parts(peers),
        )
        super()._make_groups()

    def _of_parts(
        self, peers: Callable[[Sequence[Axis]], Sequence[int]]
    ) -> tuple[DataGroups, DataGroups] | None:
        """Return the ranks that have the same parts of what is shared out over averaging ranks."""
        axes = [axis for axis in self._sample_axes if axis != "dp" and self.mesh.size(axis) > 1]
        if not axes:
            return None
        same = [axis for axis in self._gradient_axes if axis not in axes]
        ranks = DataGroups.of(self._group(peers(same)))
        return ranks, ranks.duplicate(self._local_ranks.timeout)

    def _sharing_out(self, dp: Collectives, ranks: Sequence[int]) -> DataGroups:
        """Return the groups of ranks that average gradients, some of which share out the state."""
        size = self.shard_size
        if size == len(ranks):
            return DataGroups.of(dp)
        return DataGroups(
            dp=dp,
            shard=self._group(shard_ranks(ranks, self.mesh_rank, size)),
            replicate=self._group(replicate_ranks(ranks, self.mesh_rank, size)),
        )

    def _group(self, ranks: Sequence[int]) -> Collectives:
        group = dist.new_group(
            list(ranks), timeout=self._local_ranks.timeout, use_local_synchronization=True
        )
        return self.backend.collectives(group)

    @override
    def forget_groups(self) -> None:
        self._made = None
        super().forget_groups()

    @property
    @override
    def _splits_model(self) -> bool:
        splitting = [
            one.axis for one in self.dimensions if one.has_own_samples or not one.averages_gradients
        ]
        return any(self.mesh.size(axis) > 1 for axis in splitting)

    @override
    def _needs_values(self, start: MetaStart | None) -> bool:
        return self._splits_model and not noted_alike(start, self.collectives)

    @property
    @override
    def _has_full_parameters(self) -> bool:
        return super()._has_full_parameters and not self._splits_model

    @property
    @override
    def _holds_shards(self) -> bool:
        return super()._holds_shards or self._splits_model

    @override
    def _run_view(self) -> RunView:
        return replace(
            super()._run_view(),
            groups=self._groups.along,
            of_parts=self._groups.of_parts,
            with_shards=self._hidden,
            in_hook=self._shown,
            drawn_for_own_data=self._drawn_for_own_data,
        )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        assert self._runner is not None
        self._runner = WrappedRunner(self._runner, self._ranks_in_step)
        self._metrics = MetricGroups(self.run_model, self.data_collectives.group)
        self._same_batches = SameBatches(self.model_collectives, self.model_ranks, self.root_device)

    @override
    def _work_on_engine(self, trainer: "pl.Trainer") -> None:
        super()._work_on_engine(trainer)
        self._show_weights(trainer)

    def _show_weights(self, trainer: "pl.Trainer") -> None:
        """Let hooks see full weights."""
        if isinstance(self.engine.split, Unsplit) or self._options.stage == 3:
            return
        owner: Any = trainer
        averages = averaging_callbacks(owner.callbacks, fitting=True)  # which know of shards
        callbacks = [one for one in owner.callbacks if one not in averages]
        self._weights = weights = WeightsInHooks(
            self.engine, self.mesh_rank, self._finish_copies, self._follow
        )
        self._in_hooks.enter_context(
            hooks_inside(weights.shown, self.run_module, callbacks, without=_OF_FAILURES)
        )

    def _finish_copies(self) -> None:
        for one in reversed(self.dimensions):
            one.finish_copies()

    def _follow(self) -> dict[Tensor, Callable[[], Tensor]]:
        return {key: bring for one in self.dimensions for key, bring in one.follow().items()}

    def _hidden(self) -> AbstractContextManager[None]:
        """Inside, weights are the shards that are here, also within a hook."""
        return nullcontext() if self._weights is None else self._weights.hidden()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Inside, weights look full, as in a hook; each rank must enter."""
        with ExitStack() as stack:
            for one in self.dimensions:
                stack.enter_context((one.hook_context() or nullcontext)())
            if self._weights is not None:
                stack.enter_context(self._weights.shown())
            yield

    @override
    def _seeing_shards(self) -> AbstractContextManager[None]:
        return self._hidden()

    def _ranks_in_step(self) -> AbstractContextManager[None]:
        return default_group_is(self.data_collectives.group)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._ranks_in_step():
            return super().backward(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        for one in self.dimensions:
            one.before_backward(closure_loss)
        super().pre_backward(closure_loss)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def seen() -> Any:
            result = closure()
            for one in self.dimensions:
                one.before_update(optimizer, self.optimizers.index(optimizer))
            return result

        with self._hidden():
            return super().optimizer_step(optimizer, seen, model, **kwargs)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the ranks of other samples; see `ShardStrategy`.

        Raises:
            ConfigError: Inside a step, where a dimension cannot gather with `sync_grads`.
        """
        for one in self.dimensions:
            one.check_gather(tensor, sync_grads=sync_grads)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        for one in self.dimensions:
            one.share_state()
        with self._hidden():
            return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._hidden():
            super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._hidden():
            return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        with self._hidden():
            super().load_optimizer_state_dict(checkpoint)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._is_predicting:  # data-parallel ranks may have more batches than others
            check_same_lengths(dataloader, self.model_collectives)
            for axis in self._sample_axes[1:]:  # what they have of the model is needed by all
                group = self.along(axis)
                lengths = lengths_on_ranks(dataloader, group)
                dataloader = agree_on_batches(dataloader, lengths, group, self.root_device)
        seed_workers(dataloader, self.data_collectives.rank)  # alike on the ranks of one model
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self._same_batches is not None and self.lightning_module is not None:
            stage = self.lightning_module.trainer.state.stage
            assert stage is not None
            self._same_batches.check(batch, f"{stage.value} loader {dataloader_idx}")
        return super().batch_to_device(batch, device, dataloader_idx)

    def _drawn_for_own_data(self) -> AbstractContextManager[None]:
        """Inside, data-parallel ranks draw random numbers of their own; those of a model alike."""
        data = self.data_collectives
        return drawn_apart(data, self.root_device) if data.size > 1 else nullcontext()

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._at_rest is None:
            self._restore_dimensions(full=False)  # where the set-up has failed
        if self._metrics is not None:
            self._metrics.restore()
        self._metrics = self._same_batches = self._weights = None


class ContextParallelStrategy(ModelParallelStrategy):
    """A part of every sequence on each rank; `strategy="context_parallel"`.

    Raises:
        ConfigError: A size or stage that cannot be.
    """

    @takes(ContextParallelOptions)
    def __init__(self, options: ContextParallelOptions) -> None:
        stage = options.zero_stage
        super().__init__(options.dimensions(), zero_stage=stage, **options.part(SplitOptions))


class TensorParallelStrategy(ModelParallelStrategy):
    """Wide layers in parts over the ranks of a group; `strategy="tensor_parallel"`.

    Raises:
        ConfigError: A size, stage or plan that cannot be.
    """

    @takes(TensorParallelOptions)
    def __init__(self, options: TensorParallelOptions) -> None:
        stage = options.zero_stage
        super().__init__(options.dimensions(), zero_stage=stage, **options.part(SplitOptions))


class PipelineParallelStrategy(ModelParallelStrategy):
    """Consecutive layers on each rank, microbatches in flight; `strategy="pipeline_parallel"`.

    Raises:
        ConfigError: A size, schedule or split that cannot be.
    """

    @takes(PipelineParallelOptions)
    def __init__(self, options: PipelineParallelOptions) -> None:
        super().__init__(options.dimensions(), **options.part(SplitOptions))
        (self._stages,) = [one for one in self.dimensions if isinstance(one, PipelineDimension)]

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; there from `setup` to `teardown`."""
        return self._stages.pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self._stages.options.num_parts(self.mesh.pp)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        return self._stages.options.num_stages(self.mesh.pp)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return self._stages.options.table(self.mesh.pp, num_microbatches)


class HybridParallelStrategy(ModelParallelStrategy):
    """Stages of split layers, and copies of them on other data; `strategy="hybrid_parallel"`.

    Raises:
        ConfigError: Sizes that do not fit the ranks, or what either of the two refuses.
    """

    @takes(HybridParallelOptions)
    def __init__(self, options: HybridParallelOptions) -> None:
        stage = options.zero_stage
        super().__init__(options.dimensions(), zero_stage=stage, **options.part(SplitOptions))
        (self._stages,) = [one for one in self.dimensions if isinstance(one, PipelineDimension)]
        (self._experts,) = [one for one in self.dimensions if isinstance(one, ExpertDimension)]
        self._data_parallel_size = options.data_parallel_size
        self._axis_order = options.axis_order

    @property
    @override
    def mesh(self) -> ParallelMesh:
        dp = self._data_parallel_size if isinstance(self._data_parallel_size, int) else -1
        mesh = ParallelMesh.of_world(
            self.mesh_size, **self._sizes(), dp=dp, axis_order=self._axis_order
        )
        if isinstance(self._data_parallel_size, int) or self.stage == 0:
            return mesh
        return replace(mesh, shard=shard_size(self._data_parallel_size, mesh.dp))

    @property
    @override
    def shard_size(self) -> int:
        dp = self.mesh.dp  # a copy of the state is in shards on all that share its sequences
        return shard_size(self._data_parallel_size, dp) * (super().shard_size // dp)

    @override
    def placement(self, ranks_per_node: int) -> NodePlacement:
        mesh, found = self.mesh, super().placement(ranks_per_node)
        about = mesh.shard and warning_of_unshards(mesh, mesh.shard, ranks_per_node)
        return replace(found, warnings=(*found.warnings, about)) if about else found

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; there from `setup` to `teardown`."""
        return self._stages.pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self._stages.options.num_parts(self.mesh.pp)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        return self._stages.options.num_stages(self.mesh.pp)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return self._stages.options.table(self.mesh.pp, num_microbatches)

    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """Return by name how the tokens of each mixture were shared out in this fit, or the last.

        Each rank must call while the fit runs.
        """
        return self._experts.load()
