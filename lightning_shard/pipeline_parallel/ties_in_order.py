"""A pipeline's gradients added up as one rank adds them, also of weights that stages share.

    stage 3 (head)    stage 0 (embedding)

    microbatch k:  g ────────> g + own ──> the tree over the microbatches, on the first stage's rank

One rank's backward meets the last use first, and adds each earlier one to that; so a microbatch's
gradient goes from the last stage that has the parameter to the first, before any sum over
microbatches is made. Where halves of backwards come at their own time, all of them go at the end.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.gradients.tree_sum import TreeSum
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.gradients import GradientStash, num_uses
from lightning_shard.pipeline_parallel.messages import packed, unpacked
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.pipeline_parallel.split import PipelineSplit

_DTYPE_BYTES = 64  # of a format, pickled; None for a gradient that is not there


class TiesInOrder:
    """Brings together what stages have of one microbatch's gradient."""

    def __init__(self, split: PipelineSplit) -> None:
        self._split, self._rank = split, split.group.rank
        self._stages = {p: stages for p, stages in split.param_stages.items() if len(stages) > 1}
        self._numbers = {param: number for number, param in enumerate(self._stages)}
        self._here: dict[tuple[nn.Parameter, int, int], Tensor | None] = {}
        self._later: list[tuple[int, int, nn.Parameter, Tensor | None]] = []
        self._sending: list[Pending] = []
        self._waits = False  # for the end of the batch

    def begin(self, schedule: Schedule) -> None:
        """Begin a batch, in which a stage may make its gradients before a later one has its own."""
        self._waits = any(one.kind == "W" for actions in schedule.actions for one in actions)

    def check(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Refuse a stage that would have added up uses which one rank adds to later ones."""
        inner = [param for param, stages in self._stages.items() if stage in stages[:-1]]
        found = num_uses(roots, inner) if inner else {}
        if any(number > 1 for number in found.values()):
            raise ConfigError(
                f"Rank {self._rank}: same_bits=True, but stage {stage} of the pipeline uses a "
                f"parameter several times that a later stage has, too, and would add up its own "
                f"gradients first, expected one use in each stage but the last. Untie the weights, "
                f"or use strategy='zero2'."
            )

    def added(
        self,
        stage: int,
        number: int,
        params: Sequence[nn.Parameter],
        grads: Sequence[Tensor | None],
    ) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield the gradients of a microbatch that are whole after what a stage has made."""
        for param, grad in zip(params, grads, strict=True):
            dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
            if param not in self._stages:
                yield param, dense
            elif self._waits:
                self._later.append((stage, number, param, dense))
            else:
                yield from self._met(stage, number, param, dense)

    def finish(self) -> Iterator[tuple[int, nn.Parameter, Tensor | None]]:
        """At the end of a batch, yield the rest, with the numbers of microbatches."""
        later, self._later = self._later, []
        for stage, number, param, grad in sorted(later, key=lambda one: (-one[0], one[1])):
            for _, whole in self._met(stage, number, param, grad):
                yield number, param, whole
        for one in self._sending:
            one.wait()
        self._sending.clear()

    def _met(
        self, stage: int, number: int, param: nn.Parameter, grad: Tensor | None
    ) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        stages = self._stages[param]
        place = stages.index(stage)
        if stage != stages[-1]:
            came = self._receive(stages[place + 1], number, param)
            grad = came if grad is None else grad if came is None else came + grad
        if stage == stages[0]:
            yield param, grad
        else:
            self._send(stage, stages[place - 1], number, param, grad)

    def _tag(self, stage: int, number: int, param: nn.Parameter) -> int:
        num_stages = len(self._split.stage_ranks)
        return (number * len(self._stages) + self._numbers[param]) * num_stages + stage

    def _send(
        self, stage: int, to: int, number: int, param: nn.Parameter, grad: Tensor | None
    ) -> None:
        peer = self._split.stage_ranks[to]
        if peer == self._rank:
            self._here[param, stage, number] = grad
            return
        (group, ranks), tag = self._split.beside(param), self._tag(stage, number, param)
        dtype = None if grad is None else grad.dtype
        sent = [packed(dtype, _DTYPE_BYTES, self._split.device)]
        sent += [] if grad is None else [grad.contiguous()]
        for one in sent:
            self._sending.append(group.send(one, ranks.index(peer), tag, async_op=True))

    def _receive(self, stage: int, number: int, param: nn.Parameter) -> Tensor | None:
        peer, device = self._split.stage_ranks[stage], self._split.device
        if peer == self._rank:
            return self._here.pop((param, stage, number))
        (group, ranks), tag = self._split.beside(param), self._tag(stage, number, param)
        kind = torch.empty(_DTYPE_BYTES, dtype=torch.uint8, device=device)
        group.recv(kind, ranks.index(peer), tag)
        dtype = unpacked(kind)
        if dtype is None:
            return None
        grad = torch.empty(self._split.shapes[param], dtype=dtype, device=device)
        group.recv(grad, ranks.index(peer), tag)
        return grad


class StashInOrder(GradientStash):
    """Sums in the order of the microbatches' numbers, whatever the schedule: see `TreeSum`."""

    has_all = True

    def __init__(
        self, params: Sequence[nn.Parameter], seed: Tensor | float, ties: TiesInOrder
    ) -> None:
        super().__init__(params, seed)
        self._ties = ties
        self._trees: dict[nn.Parameter, TreeSum] = {}
        self._missed: dict[nn.Parameter, list[int]] = {}  # the microbatches that do not use it

    @override
    @torch.no_grad()
    def add(
        self,
        params: Sequence[nn.Parameter],
        grads: Sequence[Tensor | None],
        number: int = 0,
        stage: int = 0,
    ) -> None:
        for param, grad in self._ties.added(stage, number, params, grads):
            self._put(number, param, grad)

    def _put(self, number: int, param: nn.Parameter, grad: Tensor | None) -> None:
        if grad is None:
            self._missed.setdefault(param, []).append(number)
        else:
            self._trees.setdefault(param, TreeSum()).put(number, grad, is_lent=True)

    @override
    @torch.no_grad()
    def close(self) -> None:
        for one in self._ties.finish():
            self._put(*one)
        for param, tree in self._trees.items():
            for number in self._missed.get(param, ()):
                tree.put(number, torch.zeros_like(tree.held[0]))
            self._sums[param] = tree.take()
