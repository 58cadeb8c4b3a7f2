"""The cost of each block, measured in one forward of the user's step.

    step     embed ──> block 0 ──> block 1 ──> norm ──> head ──> loss
    counted  before    0           1           after ──────────────>

The step runs on tensors without elements first, so that a model larger than this machine can be
measured. A step that asks for elements then runs once on the real ones.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod
from typing import Literal, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from lightning_shard.core.modules import gpus_of, random_streams_kept
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.held_bytes import storage_bytes
from lightning_shard.data_parallel.offload.activations import stretch_bytes
from lightning_shard.data_parallel.recompute.recomputation import observed_by
from lightning_shard.data_parallel.torch_private import (
    FAKE_TENSOR_LOGGER,
    FakeTensorMode,
    storage_key,
)
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.partition import BlockCosts, used_at
from lightning_shard.pipeline_parallel.skipped_blocks import uncompiled
from lightning_shard.tensor_parallel.dim_sharded_tensor import own_part


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the operations of two products: queries with keys, and weights with values."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_UNCOUNTED = {  # by torch's own table
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, **kwargs: _attention(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, **kwargs: 2 * _attention(query, key, value)
    ),
    torch.ops.aten._grouped_mm: (
        lambda rows, *args, out_shape, **kwargs: 2 * prod(out_shape) * rows[-1]
    ),
}
_TRAINED_BYTES = 16  # per value: weight, gradient and two moments, or halves and a master weight


def measure_blocks(
    model: nn.Module,
    blocks: BlockList,
    run: Callable[[], object],
    *,
    what: Literal["flops", "memory"] = "flops",
    device: torch.device | None = None,
) -> BlockCosts:
    """Run a step and return its blocks' costs; model and random streams stay as they are.

    Args:
        model: The full model, whose parameters may be on meta.
        blocks: The block list that `find_blocks` found.
        run: Calls the user's step on one batch; called twice where the step asks for elements.
        what: "flops" of the forward, or "memory": bytes saved for backward, and 16 for each trained
            value.
        device: Device of the batch, where the parameters are on another one.

    Raises:
        ConfigError: The step asks for elements, which parameters on meta do not have.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    try:
        with setting(logger, disabled=True):  # what fails is run again
            costs = _measure(model, blocks, run, what, _StandIns(mode, device))
    except Exception as error:
        if any(param.is_meta for param in model.parameters()):
            raise ConfigError(
                f"Blocks are measured in a step of {type(model).__name__}, which failed on "
                f"parameters without values ({type(error).__name__}: {error}); expected a step "
                f"that does not ask for them."
            ) from error
        costs = _measure(
            model, blocks, run, what, _StandIns(None, None)
        )  # a broken step raises once more
    return costs if what == "flops" else _with_parameters(model, blocks, costs)


class _Meter:
    """Divides a growing count between the parts of a step: before, each block, after."""

    def __init__(self, num_blocks: int, read: Callable[[], int]) -> None:
        self._counts = [0] * (num_blocks + 2)
        self._read = read
        self._last = 0
        self._part = 0

    def enter(self, part: int) -> None:
        """Attribute the count to another part from now on."""
        now = self._read()
        self._counts[self._part] += now - self._last
        self._last, self._part = now, part

    def costs(self) -> BlockCosts:
        """Return the count of each part."""
        self.enter(self._part)
        before, *blocks, after = self._counts
        return BlockCosts(before=before, blocks=tuple(blocks), after=after)

    @contextmanager
    def attached(self, blocks: BlockList) -> Iterator[None]:
        """Follow the calls of the blocks inside; the count between two blocks is the former's."""
        with ExitStack() as handles:
            for part, block in enumerate(blocks.modules, start=1):
                hook = block.register_forward_pre_hook(lambda *_, part=part: self.enter(part))
                handles.enter_context(hook)
            last = blocks.modules[-1].register_forward_hook(lambda *_: self.enter(len(blocks) + 1))
            handles.enter_context(last)
            yield


class _NoModules(ModuleTracker):
    """Follows no modules: all is counted as the whole's."""

    def __init__(self) -> None:
        self.parents = {"Global"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing, since nothing was entered."""


class FlopCounter(FlopCounterMode):
    """Counts the arithmetic of matrix products, attention and convolutions."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_UNCOUNTED)
        # Torch follows modules to count for each, by hooks that a step's own autograd.grad of a
        # leaf fails in; here only the sum is asked for.
        self.mod_tracker = _NoModules()

    @property
    def total(self) -> int:
        """Number of operations counted so far."""
        return self.get_total_flops()


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that are kept for backward while it is entered, each storage once.

    Kept are the tensors that autograd and checkpoints save, without those that are `known`.

    Attributes:
        recomputed: Bytes of the largest recomputation inside `backward`, without what is kept.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self.recomputed = 0
        self._known = {storage_key(one): one for one in known}
        self._kept: dict[int, Tensor] = {}
        self._staying: set[int] = set()
        self._observing = ExitStack()

    def __enter__(self) -> "SavedBytes":  # type: ignore[override]
        super().__enter__()
        self._observing.enter_context(observed_by(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._observing.close()
        super().__exit__(*error)

    def _note(self, tensor: Tensor) -> Tensor:
        self.keep([tensor])
        return tensor

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept, also outside of autograd; other stages' hold nothing."""
        for tensor in map(own_part, tensors):
            if not is_placeholder(tensor) and storage_key(tensor) not in self._known:
                self._kept.setdefault(storage_key(tensor), tensor)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that the device has until backward, also where activations are offloaded."""
        self._staying |= {storage_key(own_part(one)) for one in tensors}

    def backward(self) -> AbstractContextManager[object]:
        """Make the context of a backward, in which recomputations are counted."""
        return observed_by(self)

    @contextmanager
    def recomputing(self, tensors: Iterable[Tensor]) -> Iterator[Callable[[Tensor], None]]:
        """Count what one recomputation saves."""
        held = (
            {storage_key(own_part(one)) for one in tensors} | self._known.keys() | self._kept.keys()
        )
        found: list[Tensor] = []

        def note(tensor: Tensor) -> None:
            if storage_key(tensor) not in held:
                found.append(tensor)

        try:
            yield note
        finally:
            self.recomputed = max(self.recomputed, storage_bytes(found))

    @property
    def total(self) -> int:
        """Number of bytes counted so far."""
        return storage_bytes(self._kept.values())

    @property
    def moving(self) -> tuple[int, ...]:
        """The bytes of each stretch of memory that goes to the host under offload, in order."""
        leaving = [one for key, one in self._kept.items() if key not in self._staying]
        return tuple(filter(None, map(stretch_bytes, leaving)))


class _StepModule(nn.Module):
    """A step as a module, whose parameters can be replaced while it runs."""

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self) -> None:
        self._run()


class _StandIns:
    """Stand-ins for parameters and buffers: copies, whose writes are lost, or without elements."""

    # Without elements the step runs in `mode`, as the batch has none either.

    def __init__(self, mode: FakeTensorMode | None, device: torch.device | None) -> None:
        self._device, self.mode = device, mode

    def param(self, param: nn.Parameter) -> nn.Parameter:
        """Return a parameter that takes the gradients instead."""
        value = param.detach() if self.mode is None else self.buffer(param)
        return nn.Parameter(value, requires_grad=param.requires_grad)

    def buffer(self, buffer: Tensor) -> Tensor:
        """Return a copy of the buffer, or a placeholder of its shape."""
        if self.mode is None:
            return buffer.clone()
        device = self._device or torch.device("cpu" if buffer.is_meta else buffer.device)
        return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)


def _measure(
    model: nn.Module,
    blocks: BlockList,
    run: Callable[[], object],
    what: str,
    stand_ins: _StandIns,
) -> BlockCosts:
    """Run the step with stand-ins for parameters and buffers."""
    step = _StepModule(model, run)
    with (
        random_streams_kept(gpus_of(model)),
        _attributes_kept(model),
        uncompiled(),
        warnings.catch_warnings(),
        stand_ins.mode or nullcontext(),
    ):
        warnings.simplefilter("ignore")  # the real step gives those of the model's own again
        params = {name: stand_ins.param(param) for name, param in step.named_parameters()}
        buffers = {name: stand_ins.buffer(buffer) for name, buffer in step.named_buffers()}
        counter = FlopCounter() if what == "flops" else SavedBytes(params.values())
        meter = _Meter(len(blocks), lambda: counter.total)
        with counter, meter.attached(blocks):
            torch.func.functional_call(step, {**params, **buffers}, ())
            return meter.costs()


def _with_parameters(model: nn.Module, blocks: BlockList, costs: BlockCosts) -> BlockCosts:
    """Add the bytes that parameters need in training; for frozen ones their own size."""
    totals = [costs.before, *costs.blocks, costs.after]
    for param, places in used_at(model, blocks, nn.Module.parameters).items():
        bytes_each = _TRAINED_BYTES if param.requires_grad else param.element_size()
        for place in places:
            totals[place + 1] += bytes_each * param.numel()
    before, *inner, after = totals
    return BlockCosts(before=before, blocks=tuple(inner), after=after)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes, in which a metric, for example, keeps its counts."""
    states = [vars(module) for module in model.modules()]
    values = [value for state in states for value in state.values()]
    lists = [(value, [*value]) for value in values if isinstance(value, list)]
    tensors = [(value, value.detach().clone()) for value in values if type(value) is Tensor]
    with ExitStack() as kept:
        for one in (*states, *(value for value in values if isinstance(value, dict))):
            kept.enter_context(patch.dict(one))
        try:
            yield
        finally:
            for items, before in lists:
                items[:] = before
            for tensor, elements in tensors:
                tensor.detach().copy_(elements)
