"""One microbatch on one stage: the user's step runs, and only the stage's part is computed.

    step ──> before ──> block 0 .. first-1 ──> first .. stop-1 ──> block `stop`
             (stands in)     (skipped)    ▲        (computed)         └─ arguments are sent
                                          └─ arguments received

The last stage has no block `stop`: there the step runs on to its result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard.core.placeholders import OtherStageError, Placeholder, is_placeholder
from lightning_shard.core.states import MakesContext, having
from lightning_shard.data_parallel.offload.activations import stay
from lightning_shard.data_parallel.recompute.recomputation import computed
from lightning_shard.data_parallel.views.transforms import OF_STAGES, refuse_transforms
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.alike_steps import NotedCalls
from lightning_shard.pipeline_parallel.containers import exchange_tensors, map_tensors, tensors_in
from lightning_shard.pipeline_parallel.skipped_blocks import (
    BlockCall,
    Skipped,
    Template,
    template_of_call,
)

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
_running: ContextVar["StageRun | None"] = ContextVar("running", default=None)

_ADVICE_FIRST = "Register the module that computes what the blocks are called with before them."
_ADVICE_LATER = (
    "Let the blocks take and return what is used after them, or register the module that computes "
    "it after the blocks; a weight that is used there as well can be tied (head.weight = "
    "embedding.weight), and a penalty over weights is the optimizer's weight_decay."
)


class Stance:
    """The stance of torch.compile during one step.

        step ──> before ──> skipped blocks ──> own blocks ──> end, or what follows the last block
                 └──────as it is written─────┘ └─compiled────────────────────────────────────────┘

    Before its blocks a stage computes with stand-ins, which compiled code cannot take.
    """

    def __init__(self) -> None:
        self._eager: Any = None  # what has set the stance

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Run a step inside, whose compiled code runs uncompiled except in the stage's blocks."""
        eager = self._eager = torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            self._eager = None
            eager.__exit__(None, None, None)

    @contextmanager
    def compiled(self, *, is_last: bool) -> Iterator[None]:
        """Run one of the stage's blocks inside, compiled where the user has compiled it."""
        eager = self._eager
        if eager is None:  # in backward
            yield
            return
        eager.__exit__(None, None, None)
        try:
            yield
        finally:
            if not is_last:
                eager.__enter__()


class Needed(NamedTuple):
    """The places of earlier stages' tensors among all in the arguments of a stage's first block."""

    places: tuple[int, ...]
    num_tensors: int


def running_stage() -> "StageRun | None":
    """Return the run whose step or block this thread is in; None in a trial, and elsewhere."""
    return _running.get()


class StepCutShort(BaseException):
    """Ends a step on a stage that has done its part; never seen by user code's `except`."""


class StageRun:
    """The run of one microbatch through one stage, from its forward to its backward.

    Args:
        stage: Number of the stage.
        first: Index of the stage's first block.
        stop: Index of the first block after the stage.
        block_names: Names of all blocks, for error messages.
        needed: Tensors of the next stage's first call that are sent to it; None on the last stage.
        received: Tensors that the previous stage has sent, in its order; None on the first stage.
        entering: Called when the first block of the stage begins.
        leaving: Makes the context of what comes after the last block, on the last stage.
        noted: Notes what is called before the first block, where that is asked for.

    Attributes:
        outputs: The tensors that the next stage needs.
        is_skipped: Whether the step returned None before it called the network.
        position: Where the step is: 2 * i before block i, one more in it.
        is_over: Whether the step has ended: what is called then is computed again.
        block_context: Makes the context of each block in the step, from the block's name.
    """

    def __init__(
        self,
        stage: int,
        first: int,
        stop: int,
        block_names: Sequence[str],
        *,
        needed: Needed | None,
        received: Sequence[Tensor] | None = None,
        entering: Callable[[], None] = lambda: None,
        leaving: MakesContext = nullcontext,
        noted: NotedCalls | None = None,
    ) -> None:
        self.stage = stage
        self.inputs = list(received or ())
        self.outputs: list[Tensor] = []
        self.result: Any = None
        self.is_skipped = False
        self._first, self._stop = first, stop
        self._names = block_names
        self._needed = needed
        self._is_later = received is not None
        self._entering, self._leaving, self._noted = entering, leaving, noted
        self._after = ExitStack()
        self._entered = self._cut = self.is_over = False
        self.position = 0
        self._received: list[_Received] = []
        self._stance = Stance()
        self.block_context: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def forward(self, step: Callable[[], Any]) -> None:
        """Run the user's step, of which this stage's part is computed.

        Raises:
            ConfigError: The step does not call the blocks once, in order, or uses a value of
                another stage in another way than as an argument of a block.
        """
        noting = nullcontext() if self._noted is None else self._noted.noting()
        try:
            with having(_running, self), self._stance.as_written(), noting, self._after:
                self.result = step()
        except StepCutShort:
            return
        finally:
            self.is_over = True
            self._note_writes()
        if self.result is None and not self._entered:
            self.is_skipped = True
            return
        self.check(self.result)
        self.result = map_tensors(self.result, _value_of)

    def check(self, result: Any) -> None:
        """Refuse what a step has returned if it missed blocks, or if its result is unknown here."""
        if result is None and not self._entered:
            return
        if not self._entered or (self._needed is not None and not self._cut):
            missed = self._names[self._stop if self._entered else self._first]
            raise ConfigError(
                f"Stage {self.stage}: the step ended without calling the block {missed!r}, "
                f"expected it to call the network once, all blocks in order."
            )
        for tensor in tensors_in(map_tensors(result, _value_of)):
            self._refuse_placeholder(tensor, "the step's result")

    @contextmanager
    def known(self) -> Iterator[None]:
        """Give the stand-ins for received tensors their values inside."""
        for one in self._received:
            one.stand_in.value = one.value
        try:
            yield
        finally:
            for one in self._received:
                one.stand_in.value = None
        for one in self._received:
            if one.stand_in._version != one.version:
                raise ConfigError(
                    f"Stage {self.stage}: what the block {self._names[self._first]!r} was called "
                    f"with is written to afterwards, through a view that was made before; expected "
                    f"writes to the tensor itself. Make the view after the call."
                )

    @property
    def is_in_block(self) -> bool:
        """Whether the step is in a block, of this stage or of another."""
        return self.position % 2 == 1

    @property
    def stands_in(self) -> bool:
        """Whether the step is in a block of another stage."""
        return self.is_in_block and self.position < 2 * self._first

    def asks(self, tensor: Tensor) -> bool:
        """Say whether an argument of a block, or what was sent for it, asks for a gradient."""
        sent = self.inputs if is_placeholder(tensor) else [tensor]
        return any(one.requires_grad for one in sent)

    def unnoted(self) -> AbstractContextManager[None]:
        """Return the context of what is no part of the step, though it runs amid it."""
        return nullcontext() if self._noted is None else self._noted.paused()

    def _note_writes(self) -> None:
        """Let the previous stage's backward see writes to tensors that it may have saved."""
        for tensor, one in zip(self.inputs, self._received, strict=False):
            if one.value is not tensor and one.value._version:
                torch.autograd.graph.increment_version(tensor)

    def call(self, index: int, skipped: Skipped, call: BlockCall) -> Any:
        """Skip or run block `index`, or end the step there, as this stage has to."""
        refuse_transforms(OF_STAGES)
        if self._noted is not None:
            self._noted.stop()
        if index < self._first:
            if self._entered and not self.is_over:  # a block of an earlier stage, too late
                raise self._out_of_order(index)
            with self._inside(index):
                return skipped(call)
        if index >= self._stop:
            self._end(index, call.arguments)
        if index == self._first:
            (self._enter_again if self.is_over else self._enter)(call.arguments)
        with self._inside(index):
            return self._called(index, call)

    @contextmanager
    def _inside(self, index: int) -> Iterator[None]:
        token, self.position = _running.set(self), 2 * index + 1
        try:
            with nullcontext() if self.is_over else self.block_context(self._names[index]):
                yield
        finally:
            _running.reset(token)
            self.position = 2 * index + 2

    def _enter(self, arguments: Arguments) -> None:
        if self._entered:
            raise self._out_of_order(self._first)
        self._entered = True
        if self._is_later:
            places = placeholders_in(arguments)
            if len(places) != len(self.inputs):
                raise ConfigError(
                    f"Stage {self.stage}: the block {self._names[self._first]!r} is called with "
                    f"{len(places)} tensors of earlier stages, expected {len(self.inputs)} as in "
                    f"the first batch. The arguments of the blocks must have the same structure in "
                    f"every step."
                )
            leaves = tensors_in(arguments)
            for place, tensor in zip(places, self.inputs, strict=True):
                self._received.append(_Received(leaves[place], tensor))
            stay(self.inputs)
        self._entering()

    def _enter_again(self, arguments: Arguments) -> None:
        """Enter the first block again, as a checkpoint around it recomputes it in backward."""
        stand_ins = {id(one): one for one in tensors_in(arguments) if isinstance(one, Placeholder)}
        for stand_in, one in zip(stand_ins.values(), self._received, strict=False):
            stand_in.value = one.value
        self._entering()

    def _with_values(self, arguments: Arguments, index: int) -> Arguments:
        """Replace the stand-ins among the arguments by the received tensors."""

        def value(tensor: Tensor) -> Tensor:
            known = _value_of(tensor)
            self._refuse_placeholder(known, f"the arguments of {self._names[index]!r}")
            return known

        exchanged: Arguments = exchange_tensors(arguments, value)
        return exchanged

    def _refuse_placeholder(self, tensor: Tensor, where: str) -> None:
        if is_placeholder(tensor):
            raise OtherStageError(
                f"{_ADVICE_LATER if self._is_later else _ADVICE_FIRST} Or use strategy='zero3'. "
                f"Stage {self.stage}: {where} holds a value of shape {tuple(tensor.shape)} that is "
                f"computed from {getattr(tensor, 'origin', '')!r} on another stage and has not "
                f"passed through the blocks, expected values to reach a later stage as arguments "
                f"of its first block.",
                getattr(tensor, "origins", frozenset()),
            )

    def _end(self, index: int, arguments: Arguments) -> None:
        """Keep the tensors that the next stage needs, and end the step."""
        if not self._entered or index != self._stop or self._needed is None:
            raise self._out_of_order(index)
        leaves = tensors_in(self._with_values(arguments, index))
        if len(leaves) != self._needed.num_tensors:
            raise ConfigError(
                f"Stage {self.stage}: the block {self._names[index]!r} is called with "
                f"{len(leaves)} tensors, expected {self._needed.num_tensors} as on the next stage."
            )
        self.outputs = [leaves[place] for place in self._needed.places]
        self._cut = True
        raise StepCutShort

    def _out_of_order(self, index: int) -> ConfigError:
        own = " to ".join(map(repr, {self._names[self._first]: 0, self._names[self._stop - 1]: 0}))
        when = "after" if self._entered else "before"
        return ConfigError(
            f"Where the network is called several times in a step, concatenate the inputs of all "
            f"calls along the batch and call it once, or use strategy='zero3'. Stage {self.stage}: "
            f"the step calls the block {self._names[index]!r} {when} the blocks of this stage "
            f"({own}), expected all blocks once, in order: a pipeline sends each batch through its "
            f"stages once."
        )

    def _called(self, index: int, call: BlockCall) -> Any:
        """Call a block; its errors get a note with the block's name and the arguments' shapes."""
        args, kwargs = self._with_values(call.arguments, index)
        is_last = self._needed is None and index == self._stop - 1
        try:
            with self._stance.compiled(is_last=is_last):
                result = call.function(*args, **kwargs)
        except Exception as error:
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors_in((args, kwargs)))
            error.add_note(
                f"Raised in the block {self._names[index]!r} on stage {self.stage} of the "
                f"pipeline, which is called with tensors of shape {shapes or 'none'}."
            )
            raise
        if is_last and not self.is_over:
            self._after.enter_context(self._leaving())
        return result


class _Received:
    """A received tensor and its stand-in, which has the tensor's value from now on."""

    def __init__(self, stand_in: Tensor, tensor: Tensor) -> None:
        assert isinstance(stand_in, Placeholder)
        self.stand_in = stand_in
        self.version = stand_in._version
        self.value: Tensor = tensor
        if tensor.requires_grad:
            self.value = computed(tensor)
        stand_in.value = self.value


def _value_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Placeholder) and tensor.value is not None:
        return tensor.value
    return tensor


class Probe:
    """Runs a step up to a stage's first block, to find the arguments that are missing there.

    Block 0 is run, to learn its result's template; `forget` is called after that.

    Attributes:
        needed: The missing tensors; None when the step does not call the block.
        is_skipped: Whether the step has returned None instead.
        is_called: Whether the step has called any block.
        template: Template of the result of block 0; None before it has run.
    """

    def __init__(self, first: int, forget: Callable[[], None] = lambda: None) -> None:
        self._first, self._forget = first, forget
        self.needed: Needed | None = None
        self.is_skipped = self.is_called = False
        self.template: Template | None = None

    def known(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, since a probe receives nothing."""
        return nullcontext()

    def asks(self, tensor: Tensor) -> bool:
        """Say that all ask for a gradient, since a probe has no backward."""
        return True

    def forward(self, step: Callable[[], Any]) -> None:
        """Run the step up to the stage's first block."""
        try:
            with Stance().as_written():
                self.is_skipped = step() is None
        except StepCutShort:
            return

    def call(self, index: int, skipped: Skipped, call: BlockCall) -> Any:
        """Skip the blocks of earlier stages, and end the step at the stage's first block."""
        refuse_transforms(OF_STAGES)
        self.is_called = True
        if index < self._first:
            return skipped(call)
        leaves = tensors_in(call.arguments)
        self.needed = Needed(tuple(placeholders_in(call.arguments)), len(leaves))
        if index == 0:
            self.template = template_of_call(call, self._forget)
        raise StepCutShort


def placeholders_in(arguments: Arguments) -> list[int]:
    """Return the indices of the tensors of other stages, each tensor once."""
    found: dict[int, int] = {}
    for index, tensor in enumerate(tensors_in(arguments)):
        if is_placeholder(tensor):
            found.setdefault(id(tensor), index)
    return list(found.values())
