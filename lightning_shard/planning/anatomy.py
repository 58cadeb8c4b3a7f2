"""What a model's parts take: what comes before its blocks, one block, and what comes after.

    unpipelined   around + blocks x one block          from steps with two and with three blocks
    pipelined     | first | middle | last |            from a step of three stages of one block

Each figure is linear in the samples of a microbatch and in the number of blocks, so few short steps
say what any number of either takes. The steps are dry runs: the code that trains counts them.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard.core._lightning import runners_of
from lightning_shard.data_parallel.memory.inner_tensors import is_composed
from lightning_shard.errors import ConfigError
from lightning_shard.optim.blockwise import bytes_in_blocks
from lightning_shard.pipeline_parallel.blocks import BlockList, find_blocks
from lightning_shard.pipeline_parallel.microbatches import batch_size_of
from lightning_shard.pipeline_parallel.partition import BlockCosts, used_at
from lightning_shard.pipeline_parallel.skipped_blocks import uncompiled
from lightning_shard.planning.candidates import Checkpointing, strategy_class
from lightning_shard.planning.dry_run import SimulatedWorld, attached, step_flops, trace_of
from lightning_shard.planning.report import RankFigures
from lightning_shard.planning.simulated_model import NoElements, copied_with
from lightning_shard.planning.simulated_step import StepTrace
from lightning_shard.precision.policy import TRUE_DTYPES
from lightning_shard.tensor_parallel.automatic import automatic_plan

_SHORT = (2, 3)  # blocks of the two unpipelined steps
_STAGES = [1, 2]  # first blocks of the later stages of the pipelined step
_SIZES = (1, 2), (2, 4)  # samples; a batch norm takes no single one
_OF_ADAM = 2  # values of state for each trained element


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of a part of the model on one rank, in bytes.

    Attributes:
        used: Bytes in the format that stage 3 brings them together in.
        own: Bytes in their own format, in which gradients and each value of state are, too.
        trained: The part of `own` that is trained.
    """

    used: int = 0
    own: int = 0
    trained: int = 0
    numel: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(**{name: mine + vars(other)[name] for name, mine in vars(self).items()})

    def __mul__(self, times: int) -> "Weights":
        return Weights(**{name: times * mine for name, mine in vars(self).items()})


@dataclass(frozen=True)
class Bilinear:
    """A figure of b samples and k blocks: (base + each k) + b (sample + sample_block k)."""

    base: float
    block: float
    sample: float
    sample_block: float

    def at(self, samples: float, blocks: float) -> float:
        """Return the figure of so many samples and blocks, at least 0."""
        fixed = self.base + self.block * blocks
        return max(0.0, fixed + samples * (self.sample + self.sample_block * blocks))

    @classmethod
    def through(
        cls, value: Callable[[int, int], float], sizes: tuple[int, int], blocks: tuple[int, int]
    ) -> "Bilinear":
        """Return the figure that has the given values at two numbers of samples and of blocks."""
        few, more = blocks
        slopes = [(value(size, more) - value(size, few)) / (more - few) for size in sizes]
        bases = [value(size, few) - few * slope for size, slope in zip(sizes, slopes, strict=True)]
        least, step = sizes[0], sizes[1] - sizes[0]
        sample, sample_block = (bases[1] - bases[0]) / step, (slopes[1] - slopes[0]) / step
        return cls(
            bases[0] - least * sample, slopes[0] - least * sample_block, sample, sample_block
        )


@dataclass(frozen=True, kw_only=True)
class Unpipelined:
    """Figures of a rank that has the whole depth; see `StepTrace`."""

    saved: Bilinear
    most: Bilinear
    moved: Bilinear
    sent: Bilinear


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Figures of the first, a middle and the last stage of a pipeline, of one microbatch, in bytes.

    Attributes:
        saved: What a microbatch keeps for backward, by place of the stage.
        sent_tp: What goes to tensor-parallel peers, by place.
    """

    saved: dict[str, Bilinear]
    recomputed: Bilinear
    sent_tp: dict[str, Bilinear]
    forward_message: Bilinear
    backward_message: Bilinear


class Anatomy:
    """A module's parts, each looked at when it is asked for, once."""

    def __init__(
        self, module: "pl.LightningModule", batch: Any, precision: str, plan: dict[str, Any] | None
    ) -> None:
        self.module, self.precision, self.plan = module, precision, plan
        self._batch = batch
        self._plans: dict[int, dict[str, Any]] = {}
        self.blocks = repeated_blocks(module)
        self.num_blocks = 0 if self.blocks is None else len(self.blocks)
        self.short = cache(self._shortened)
        self.sizes, self.refusal = _SIZES[0], ""
        try:
            self.flops = self._flops()
        except Exception as error:  # whatever the user's step raises
            self.sizes, self.refusal = _SIZES[1], f"{type(error).__name__}: {error}"
            self.flops = self._flops()
        self.weights = cache(self._weighed)
        self.stages = cache(self._staged)
        self._traces = cache(self._traced)
        self.state_values = _state_values(module, TRUE_DTYPES.get(precision))

    @property
    def frozen_share(self) -> float:
        """Share of the parameters' bytes that is frozen, in a format that is not quantised."""
        bytes_of = {one: one.nbytes for one in self.module.parameters()}
        frozen = (one for one in bytes_of if one.is_floating_point() and not one.requires_grad)
        return sum(bytes_of[one] for one in frozen if not is_composed(one)) / sum(bytes_of.values())

    def batch(self, size: int) -> Any:
        """Return a batch of so many samples on meta."""
        full = batch_size_of(self._batch)

        def resized(tensor: Tensor) -> Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == full:
                shape[0] = size
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        return apply_to_collection(self._batch, Tensor, resized)

    def _shortened(self, num_blocks: int) -> "pl.LightningModule":
        """Return the module with so many blocks, or with its own if they are fewer."""
        if self.blocks is None:
            return self.module
        return shortened(self.module, self.blocks, num_blocks)

    def _flops(self) -> BlockCosts:
        module, size = self.short(2), self.sizes[0]
        blocks = BlockList(path="", modules=(module,))
        if self.blocks is not None:
            blocks = _blocks_of(module, self.blocks.path)
        found = step_flops(module, self.batch(size), blocks, self.precision)
        before, (block, *_) = found.before, found.blocks
        if self.blocks is None:
            return BlockCosts(before=(before + block) / size, blocks=(), after=found.after / size)
        return BlockCosts(before=before / size, blocks=(block / size,), after=found.after / size)

    def split(self, tp: int, num_blocks: int, choice: Checkpointing, stage: int = 0) -> Any:
        """Return the strategy of stage 0 or 3 by which so many ranks share the layers alone."""
        if tp == 1:
            kind = strategy_class("ZeRO3Strategy" if stage else "DDPStrategy")
            return kind(activation_checkpointing=choice)
        plan = self._plan_of_short(tp, num_blocks)
        kind = strategy_class("TensorParallelStrategy")
        return kind(plan=plan, activation_checkpointing=choice, zero_stage=stage)

    def _plan_of_short(self, tp: int, num_blocks: int) -> dict[str, Any] | None:
        """Return `plan_of` for a `short` module, where entries may name their block by number."""
        plan = self.plan_of(tp)
        if plan is None or self.blocks is None:
            return plan
        path, last = self.blocks.path, self.num_blocks - 1
        found: dict[str, Any] = {}
        for pattern, style in plan.items():
            named = re.fullmatch(rf"{re.escape(path)}\.(\d+)(\..*)?", pattern)
            if named is None or int(named[1]) > last:
                found[pattern] = style
                continue
            places = [one for one in range(num_blocks) if min(one, last) == int(named[1])]
            found |= {f"{path}.{place}{named[2] or ''}": style for place in places}
        return found

    def plan_of(self, tp: int) -> dict[str, Any] | None:
        """Return the layers that so many ranks share: those given, or those found."""
        if self.plan is not None or tp == 1:
            return self.plan
        if tp not in self._plans:
            layers = automatic_plan(self.module, tp)
            self._plans[tp] = {layer.pattern: layer.style for layer in layers}
        return self._plans[tp]

    def _weighed(self, tp: int) -> dict[str, Weights]:
        """Return the parameters of a rank's "before", one "block", "after", and "both" ends."""
        module = self.short(1)
        world = SimulatedWorld(
            self.split(tp, 1, None),
            module,
            self.batch(self.sizes[0]),
            tp,
            self.precision,
            state_values=2,
        )
        with world.model() as (model, _):
            places = self._places(model.module)
        dtypes = world.options.engine.dtypes
        found = dict.fromkeys(("before", "block", "after", "both"), Weights())
        for param, part in model.parts.items():
            own, place = part.nbytes, places(param)
            rounded = part.numel() * dtypes.compute_dtype(param).itemsize
            one = Weights(
                used=rounded if place == "block" else own,
                own=own,
                trained=own if param.requires_grad else 0,
                numel=part.numel(),
            )
            found[place] += one
        return found

    def _places(self, module: nn.Module) -> Callable[[nn.Parameter], str]:
        if self.blocks is None:
            return lambda param: "before"
        found = used_at(module, _blocks_of(module, self.blocks.path), nn.Module.parameters)

        def place(param: nn.Parameter) -> str:
            places = found[param]
            if 0 in places:
                return "block"
            return "both" if len(places) > 1 else "before" if -1 in places else "after"

        return place

    def unpipelined(self, tp: int, choice: Checkpointing, stage: int = 0) -> Unpipelined:
        """Return the figures of a rank without a pipeline; `stage` is one that `keeps_as` has."""
        return self._traces(tp, choice, stage)

    def keeps_as(self, choice: Checkpointing, zero_stage: int) -> int:
        """Return 0 or 3, the ZeRO stage that keeps what a stage keeps for backward.

        Stage 3 brings the matrices of blocks rounded, of which autocast keeps no copies; nor does
        it of blocks that are computed again.
        """
        is_mixed = self.precision.endswith("-mixed")
        return 3 if zero_stage == 3 and is_mixed and choice is None else 0

    def _traced(self, tp: int, choice: Checkpointing, stage: int) -> Unpipelined:
        traces = dict[tuple[int, int], StepTrace]()
        for blocks in _SHORT if self.blocks is not None else _SHORT[:1]:
            module, strategy = self.short(blocks), self.split(tp, blocks, choice, stage)
            for size in self.sizes:
                traces[size, blocks] = trace_of(
                    strategy, module, self.batch(size), world_size=tp, precision=self.precision
                )

        def line(name: str) -> Bilinear:
            return Bilinear.through(
                lambda size, blocks: vars(traces.get((size, blocks), traces[size, 2]))[name],
                self.sizes,
                _SHORT,
            )

        return Unpipelined(**{name: line(name) for name in vars(traces[self.sizes[0], 2])})

    def _staged(self, tp: int, choice: Checkpointing, stage: int) -> Stages:
        """Return the figures of a pipeline's stages; `stage` is one that `keeps_as` has."""
        whole = self.unpipelined(tp, choice)
        if stage:  # which changes what blocks keep
            found, kept = self.stages(tp, choice, 0), self.unpipelined(tp, choice, stage)
            block = kept.saved.block - whole.saved.block
            sample = kept.saved.sample_block - whole.saved.sample_block
            saved = {
                place: replace(one, block=one.block + block, sample_block=one.sample_block + sample)
                for place, one in found.saved.items()
            }
            return replace(found, saved=saved)
        strategy = strategy_class("HybridParallelStrategy")(
            pipeline_parallel_size=3,
            tensor_parallel_size=tp,
            plan=self._plan_of_short(tp, 3),
            schedule="gpipe",
            num_microbatches=1,
            split=_STAGES,
            activation_checkpointing=choice,
        )
        module = self.short(3)
        ranks = {
            size: strategy.dry_run(
                module, self.batch(size), world_size=3 * tp, precision=self.precision
            ).ranks
            for size in self.sizes
        }
        ties = tied_bytes(self.weights(tp))

        def line(read: Callable[[tuple[RankFigures, ...]], float]) -> Bilinear:
            return Bilinear.through(lambda size, _: read(ranks[size]), self.sizes, (1, 2))

        return Stages(
            saved=_by_place(ranks, whole.saved, lambda one: one.memory.activations),
            recomputed=line(lambda of: of[1].memory.recomputed),
            sent_tp=_by_place(ranks, whole.sent, lambda one: one.sent["tp"]),
            forward_message=line(lambda of: of[0].sent["pp"] - ties),
            backward_message=line(lambda of: of[2].sent["pp"] - ties),
        )


def _state_values(module: "pl.LightningModule", dtype: torch.dtype | None) -> float:
    """Return how many values are kept for a trained element: fewer than Adam's two in blocks."""
    copied = NoElements().module(module, dtype=dtype, left_out=runners_of(module)).train()
    with attached(copied) as strategy, uncompiled():
        in_blocks = bytes_in_blocks(strategy.optimizers)
    trained = {one: one.nbytes for one in copied.parameters() if one.requires_grad}
    state = sum(in_blocks.get(one, _OF_ADAM * size) for one, size in trained.items())
    return state / sum(trained.values()) if in_blocks else _OF_ADAM


def _by_place(
    ranks: dict[int, tuple[RankFigures, ...]], whole: Bilinear, read: Callable[[RankFigures], float]
) -> dict[str, Bilinear]:
    """Return a figure of each stage, from stages of one block; further blocks add the same."""

    def figure(rank: int, size: int, blocks: int) -> float:
        more = whole.at(size, blocks) - whole.at(size, 1)
        return read(ranks[size][rank]) + more

    places = (("first", 0), ("middle", 1), ("last", 2))
    few, more = ranks
    return {
        place: Bilinear.through(partial(figure, rank), (few, more), (1, 2))
        for place, rank in places
    }


def tied_bytes(weights: Mapping[str, Weights]) -> int:
    """Return what each of the two end ranks sends to sum the gradients of what both have."""
    return weights["both"].numel * 4


def _blocks_of(module: nn.Module, path: str) -> BlockList:
    container = module.get_submodule(path)
    return BlockList(path=path, modules=tuple(container.children()))


def on_meta(module: "pl.LightningModule") -> "pl.LightningModule":
    """Return a copy whose parameters and buffers have shapes and no elements; ties stay ties."""
    return copied_with(lambda one: one.detach().to("meta"), module, runners_of(module))


def repeated_blocks(module: nn.Module) -> BlockList | None:
    """Return the list of a module's blocks if there is one and its blocks are alike."""
    try:
        blocks = find_blocks(module)
    except ConfigError:
        return None
    kinds = {(type(block), _shapes(block)) for block in blocks.modules}
    is_list = isinstance(module.get_submodule(blocks.path), nn.ModuleList | nn.Sequential)
    return blocks if len(kinds) == 1 and is_list and _are_set_alike(blocks.modules) else None


def _are_set_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in nothing that they are told but their number (a sliding window)."""
    told = [_settings(block) for block in blocks]
    if any(one.keys() != told[0].keys() for one in told):
        return False
    columns = ([one[name] for one in told] for name in told[0])
    return all(_is_constant(values) or _counts(values) for values in columns)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return the flags, names and whole numbers of a block's modules, and their classes."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path] = type(module)
        values = {name: value for name, value in vars(module).items() if name != "training"}
        found |= {
            f"{path}:{name}": value
            for name, value in values.items()
            if value is None or isinstance(value, bool | int | str)
        }
    return found


def _is_constant(values: Sequence[Any]) -> bool:
    return all(type(one) is type(values[0]) and one == values[0] for one in values)


def _counts(values: Sequence[Any]) -> bool:
    return all(type(one) is int and one == values[0] + place for place, one in enumerate(values))


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())


def shortened(
    module: "pl.LightningModule", blocks: BlockList, num_blocks: int
) -> "pl.LightningModule":
    """Return a copy on meta with the first `num_blocks` blocks, the last repeated if too few."""
    made = on_meta(module)
    container: Any = made.get_submodule(blocks.path)
    del container[num_blocks:]
    while len(container) < num_blocks:
        container.append(copy.deepcopy(container[-1]))
    return made
