"""A model whose blocks pass their calls to the running stage, with stand-ins for absent parameters.

Each block's class becomes a subclass made here, and its own again in the end, so that calls are
intercepted before anything that is wrapped around `forward`, such as activation checkpointing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_shard.core.extensions import (
    ModuleCopies,
    SharedByCopies,
    extend_class,
    give_class_back,
)
from lightning_shard.core.placeholders import Placeholder
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.memory.assigned import taken_out
from lightning_shard.data_parallel.recompute.checkpointed_blocks import without_reentrance
from lightning_shard.data_parallel.views.sharded_parameter import shards_as_they_are, show_kept
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.partition import Partition, Stages, buffer_stages
from lightning_shard.pipeline_parallel.skipped_blocks import (
    BlockCall,
    Skipped,
    SkippedBlock,
    Template,
)
from lightning_shard.tensor_parallel.trial import buffers_kept

_PLACE = "_pipeline_place"
MAX_FOLLOWED_NUMEL = 64  # of a tensor that goes with a step's small values


class StepRun(Protocol):
    """Gets the calls of blocks: a `StageRun` or a `Probe`."""

    def call(self, index: int, skipped: Skipped, call: BlockCall) -> Any:
        """Answer the call of block `index`: skip it, run it, or end the step there."""

    def known(self) -> AbstractContextManager[None]:
        """Give the stand-ins for received tensors their values inside."""

    def asks(self, tensor: Tensor) -> bool:
        """Say whether an argument of a block asks for a gradient."""


class StagedModel:
    """Intercepts the calls of a model's blocks until `restore`.

    Args:
        model: The full model.
        partition: Blocks of each stage.
        param_stages: Stages of each parameter.
        full_shapes: Full shape of each parameter.
        rank_stages: Stages of this rank, each of which has its own copies of the others' buffers.
        forget: Lets go of activations that split layers keep between two calls.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        param_stages: Mapping[nn.Parameter, Stages],
        full_shapes: Mapping[nn.Parameter, Sequence[int]],
        rank_stages: Sequence[int] = (),
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.partition = partition
        self._rank_stages, self.forget = rank_stages, forget
        self._model = model
        self.block_names = [partition.blocks.name(i) for i in range(len(partition.blocks))]
        self.run: StepRun | None = None  # what gets the blocks' calls now, inside of steps
        self._homes = [
            (home, name, tensor)
            for module in model.modules()
            for home in (module._parameters, module._buffers)
            for name, tensor in home.items()
            if tensor is not None
        ]
        self.params = dict(model.named_parameters())
        self._names = {param: name for name, param in self.params.items()}
        self._param_stages, self._full_shapes = param_stages, full_shapes
        self._absent: dict[int, list[_StandIn]] = {}
        self._shown: int | None = None  # the stage whose stand-ins are in their places now
        self._copies = ModuleCopies("pipeline")
        self._copies.watch(partition.blocks.modules)
        for index, block in enumerate(partition.blocks.modules):
            skipped = SkippedBlock(block, self.block_names[index])
            setattr(block, _PLACE, _BlockPosition(self, index, skipped))
            extend_class(block, "Staged", _Caught)

    @contextmanager
    def running(self, run: StepRun, stage: int) -> Iterator[None]:
        """Pass the blocks' calls to `run` inside, with stand-ins for other stages' parameters."""
        self._show(stage)
        with setting(self, run=run), run.known(), without_reentrance(run.asks):
            yield

    def refuse_others(self, tensors: Iterable[Tensor], stage: int) -> None:
        """Raise if another stage's parameter, kept outside of its module, is among tensors."""
        for tensor in tensors:
            if stage not in self._param_stages.get(tensor, (stage,)):  # type: ignore[call-overload]
                raise ConfigError(
                    f"Let the optimizer do what concerns the weights alone (weight_decay=...), or "
                    f"read parameters from their modules (self.parameters()) in each step, or use "
                    f"strategy='zero3'. The loss is computed from the parameter "
                    f"{self._names[tensor]!r} outside of its module, but the last stage of the "  # type: ignore[index]
                    f"pipeline does not have it; expected a loss of what the blocks return."
                )

    def stages_of(self, param: nn.Parameter) -> Stages:
        """Return the stages that have a parameter."""
        return self._param_stages[param]

    def shape_of(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter, also where it is absent."""
        return torch.Size(self._full_shapes[param])

    def lend(self, stage: int, param: nn.Parameter, value: Tensor) -> None:
        """Let a value stand in for a parameter of another stage, while no stage runs."""
        assert self._shown is None
        for one in self._stand_ins(stage):
            if one.place is param:
                one.other = value  # from the next exchange on

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Whether each parameter of the model requires a gradient now."""
        with shards_as_they_are():
            return tuple([param.requires_grad for param in self._param_stages])

    def hide(self) -> None:
        """Put every parameter back in its place until the next run."""
        self._show(None)

    def stand_in(self) -> None:
        """Make the stand-ins of every stage of this rank."""
        for stage in self._rank_stages:
            self._stand_ins(stage)

    def held(self) -> Iterator[Tensor]:
        """Yield parameters and buffers as the running stage has them."""
        yield from self._model.parameters()
        yield from self._model.buffers()

    def buffers(self) -> Iterator[Tensor]:
        """Yield the model's buffers."""
        return self._model.buffers()

    def own_buffers(self) -> dict[str, tuple[nn.Module, str, int]]:
        """Return by name the buffers that count on this rank: module, name in it, and stage."""
        return {
            path: (module, name, stage)
            for path, module, name, _, stage in self._named_buffers()
            if stage in self._rank_stages
        }

    def _named_buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor, int]]:
        """Yield path, module, name in it, and stage of each buffer."""
        owners = buffer_stages(self._model, self.partition)
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    full_name = f"{path}.{name}".lstrip(".")
                    yield full_name, module, name, buffer, owners[buffer][0]

    def other_buffers(self, stage: int) -> dict[str, Tensor]:
        """Return by path other stages' buffers as one stage sees them, without followed ones."""
        assert self._shown is None
        copies = {(id(one.home), one.name): one.other for one in self._stand_ins(stage)}
        return {
            path: copies.get((id(module._buffers), name), buffer)
            for path, module, name, buffer, owner in self._named_buffers()
            if owner != stage and not self.is_followed(buffer)
        }

    def is_followed(self, buffer: Tensor) -> bool:
        """Whether a buffer is the module's own and small: the last stage's steps change it."""
        is_own = any(one is buffer for one in self._model._buffers.values())
        return is_own and buffer.numel() <= MAX_FOLLOWED_NUMEL

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Put every parameter back in its place at the end of the runs inside."""
        try:
            yield
        finally:
            self._show(None)

    def buffers_kept(self) -> AbstractContextManager[None]:
        """Undo what the runs inside do to buffers, such as running statistics."""
        return buffers_kept(self._model)

    def _show(self, stage: int | None) -> None:
        if stage == self._shown:
            return
        for one in self._stand_ins(self._shown):
            one.swap()
        self._shown = stage
        for one in self._stand_ins(stage):
            one.swap()

    def _stand_ins(self, stage: int | None) -> list["_StandIn"]:
        if stage is None:
            return []
        if stage not in self._absent:
            absent: dict[Tensor, Tensor] = {
                param: Placeholder.of(param, self._full_shapes[param], self._names[param])
                for param, stages in self._param_stages.items()
                if stage not in stages
            }
            absent |= {  # and copies of buffers
                buffer: buffer.clone()
                for buffer, (owner, *_) in buffer_stages(self._model, self.partition).items()
                if owner != stage and owner in self._rank_stages and not self.is_followed(buffer)
            }
            places = [place for place in self._homes if place[2] in absent]
            self._refuse_moved(places)
            self._absent[stage] = [
                _StandIn(home, name, absent[tensor]) for home, name, tensor in places
            ]
        self._refuse_moved([(one.home, one.name, one.place) for one in self._absent[stage]])
        return self._absent[stage]

    def _refuse_moved(self, places: Iterable[tuple[Mapping[str, Any], str, Tensor]]) -> None:
        """Raise if user code has taken a tensor of another stage out of its place."""
        for home, name, tensor in places:
            if name not in home:
                name = self._names.get(tensor, name)  # type: ignore[call-overload]
                raise taken_out(
                    name, "stages of the pipeline that do not have it put a stand-in in its place"
                )

    def set_hint(self, hint: Template | None) -> None:
        """Set the template of block 0 for blocks of its class that cannot run without values."""
        first, *_ = blocks = self.partition.blocks.modules
        for block in blocks:
            if type(block) is type(first):
                getattr(block, _PLACE).skipped.hint = hint

    def restore_copies(self) -> None:
        """Make plain blocks of the copies of blocks, which belong to no stage."""
        for block in self._copies.take():
            _make_plain(block)

    def restore(self) -> None:
        """Give every block its own class back."""
        self._show(None)
        self.restore_copies()
        self._copies.end()
        for block in self.partition.blocks.modules:
            _make_plain(block)
        self._absent, self._homes = {}, []


def _make_plain(block: nn.Module) -> None:
    if _PLACE in block.__dict__:
        delattr(block, _PLACE)
        give_class_back(block, (_Caught,))


class _StandIn:
    """Exchanges a module's tensor for another one while a stage runs."""

    def __init__(self, home: dict[str, Any], name: str, other: Tensor) -> None:
        self.home, self.name, self.other = home, name, other
        self.place = home[name]  # the tensor whose place it takes
        self._is_param = isinstance(self.place, nn.Parameter)

    def swap(self) -> None:
        """Exchange the tensor and its stand-in."""
        self.home[self.name], self.other = self.other, self.home[self.name]
        if self._is_param:
            stand_in = self.home[self.name]
            show_kept(self.place, None if stand_in is self.place else stand_in)


class _BlockPosition(SharedByCopies):
    """The position of a block in its model, which its copy shares until that is made plain."""

    def __init__(self, model: StagedModel, index: int, skipped: SkippedBlock) -> None:
        self.model, self.index, self.skipped = model, index, skipped


class _Caught:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: _BlockPosition = getattr(self, _PLACE)
        run = place.model.run
        if run is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        call = BlockCall(super().__call__, args, kwargs)  # type: ignore[misc]
        return run.call(place.index, place.skipped, call)
