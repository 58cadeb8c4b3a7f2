"""Gathers full matrices from the ranks that have parts of them, for an optimizer's step.

                rank 0        rank 1                       the step           rank 0        rank 1
    up.weight   part, grad    part, grad ──all_to_all──>   by rank 0 ──all_to_all──> part   part
    norm.bias   full, grad    full, grad                   by rank 1 ──all_to_all──> full   full

Each parameter has an owner among the ranks, which alone has it in its param groups while it steps,
and its state; see `data_parallel/owners`. A message has parts of many parameters, for all owners:
each part of a matrix and of its gradient is sent once to the owner, and what it updates once back.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import LayerParts

_MESSAGE_BYTES = 32 << 20  # of this rank's parts, unless one parameter has more


class GatheredParameters:
    """Shows an optimizer the parameters that this rank gathers, inside the optimizer's view.

    Args:
        optimizer: The user's optimizer, whose parameters lie as this rank has them.
        engine: The engine that holds its parameters.

    Attributes:
        num_bytes: Bytes of the matrices and gradients that this rank has gathered for the update,
            the running one or the last.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self.num_bytes = 0
        self._optimizer, self._owners = optimizer, engine.owners
        self._exchange = None if engine.split.parts is None else _PartExchange(engine.split.parts)
        self._listed: list[list[nn.Parameter]] = []
        self._messages: list[list[nn.Parameter]] = []
        self._shown: dict[nn.Parameter, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Gather what is updated here, and take what others update off the groups.

        Each rank that has parts of the layers must call.
        """
        self.num_bytes = 0
        if self._exchange is None:
            return
        owners, groups = self._owners, self._optimizer.param_groups
        listed = [param for group in groups for param in group["params"]]
        params = [param for param in listed if param in owners.of_parts]
        if not params:
            return
        used = self._exchange.used(params)
        self._messages = list(_messages(params))
        for message in self._messages:
            self._gather(self._exchange, message, used)
        for group in groups:
            self._listed.append(group["params"])
            group["params"] = [p for p in group["params"] if not owners.gathered_elsewhere(p)]

    def _gather(
        self, exchange: "_PartExchange", message: Sequence[nn.Parameter], used: set[nn.Parameter]
    ) -> None:
        sent, awaited = exchange.nothing(), exchange.nothing()
        cut = [param for param in message if exchange.is_cut(param)]
        for param in cut:
            own = [param.data]
            if param in used:
                own.append(torch.zeros_like(own[0]) if param.grad is None else param.grad)
            if self._owners.gathers(param):
                for parts in awaited:
                    parts += own
            else:
                sent[self._owners.of_parts[param]] += own
        coming = zip(*exchange.run(sent, awaited), strict=True)
        for param in filter(self._owners.gathers, cut):
            full = exchange.full(param, next(coming))
            full_grad = exchange.full(param, next(coming)) if param in used else None
            self._shown[param] = param.data, param.grad, full_grad
            self.num_bytes += full.nbytes + (0 if full_grad is None else full_grad.nbytes)
            param.grad = None
            param.data = full
            param.grad = full_grad

    @torch.no_grad()
    def send_out(self) -> None:
        """Give every rank its part of what has been updated; each rank must call."""
        exchange = self._exchange
        if exchange is None:
            return
        for message in self._messages:
            sent, awaited = exchange.nothing(), exchange.nothing()
            for param in message:
                if not self._owners.gathers(param):
                    awaited[self._owners.of_parts[param]].append(param.data)
                    continue
                for rank, tensors in enumerate(sent):
                    tensors.append(exchange.part_of(param, rank))
                if param in self._shown:
                    self._shown[param][0].copy_(sent[exchange.rank][-1])
            for parts, updated in zip(awaited, exchange.run(sent, awaited), strict=True):
                for part, value in zip(parts, updated, strict=True):
                    part.copy_(value)

    def put_back(self) -> None:
        """Show parts again, and give the groups back what was taken off; no communication."""
        for group, listed in zip(self._optimizer.param_groups, self._listed, strict=False):
            group["params"] = listed
        for param, (part, grad, full_grad) in self._shown.items():
            left = param.grad
            param.grad = None
            param.data = part
            if left is full_grad:
                param.grad = grad
            elif left is not None and self._exchange is not None:  # the optimizer has assigned it
                param.grad = self._exchange.own_part(param, left)
        self._listed, self._messages, self._shown = [], [], {}


class _PartExchange:
    """Exchanges parts of parameters among the ranks that have them."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self.rank, self._size = parts.group.rank, parts.group.size

    def nothing(self) -> list[list[Tensor]]:
        """Return no tensors for each of the ranks."""
        return [[] for _ in range(self._size)]

    def is_cut(self, param: nn.Parameter) -> bool:
        """Whether each rank has a part of `param`, not all of it."""
        return param in self._parts.shardings

    def full(self, param: nn.Parameter, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the parts of all ranks."""
        return self._parts.shardings[param].assemble(parts)

    def part_of(self, param: nn.Parameter, rank: int) -> Tensor:
        """Return what a rank has of a parameter that is full here."""
        cut = self._parts.shardings.get(param)
        return param.data if cut is None else cut.shard(param.data, rank)

    def own_part(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor that is cut as `param` is."""
        return self._parts.shardings[param].shard(full, self.rank)

    def used(self, params: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameters that have a gradient on some rank; each rank must call."""
        flags = [param.grad is not None for param in params]
        common = torch.tensor(flags, dtype=torch.uint8, device=params[0].device)
        self._parts.group.all_reduce(common, "max").wait()
        return {param for param, is_used in zip(params, common.tolist(), strict=True) if is_used}

    def run(
        self, sent: Sequence[Sequence[Tensor]], awaited: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Send tensors to the other ranks; each rank must call where one sends.

        Args:
            sent: By rank, what it is sent; all of one format.
            awaited: By rank, tensors of the shapes that it sends; for this rank what is here.

        Returns:
            By rank, what it has sent; for this rank what is here.
        """
        some = [tensor for of_rank in (*sent, *awaited) for tensor in of_rank]
        if not some:
            return [list(one) for one in awaited]
        given, taken = ([self._numel(*one) for one in enumerate(of)] for of in (sent, awaited))
        outgoing = [
            t.reshape(-1) for rank, one in enumerate(sent) for t in one if rank != self.rank
        ]
        message = torch.cat(outgoing) if outgoing else some[0].new_empty(0)
        received = message.new_empty(sum(taken))
        self._parts.group.all_to_all(
            received, message, output_split_sizes=taken, input_split_sizes=given
        ).wait()
        flats = torch.split(received, taken)
        return [
            list(tensors) if rank == self.rank else _shaped(flat, tensors)
            for rank, (flat, tensors) in enumerate(zip(flats, awaited, strict=True))
        ]

    def _numel(self, rank: int, tensors: Sequence[Tensor]) -> int:
        return 0 if rank == self.rank else sum(tensor.numel() for tensor in tensors)


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that lie one behind the other in a flat one."""
    found = torch.split(flat, [tensor.numel() for tensor in like])
    return [one.view(tensor.shape) for one, tensor in zip(found, like, strict=True)]


def _messages(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of parameters of one format that travel together, the same on all ranks."""
    message: list[nn.Parameter] = []
    size = 0
    for param in params:
        is_other = bool(message) and param.dtype != message[0].dtype
        if message and (is_other or size + param.nbytes > _MESSAGE_BYTES):
            yield message
            message, size = [], 0
        message.append(param)
        size += param.nbytes
    if message:
        yield message
