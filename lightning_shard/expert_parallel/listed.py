"""Experts in a list: a module's forward runs twice, so that all tokens travel at once.

    rehearsal   own forward ──> experts.3(rows) ──noted──> zeros
                            ──> experts.7(rows) ──noted──> zeros
    exchange    all rows ──> the experts' ranks ──own forwards──> results ──> back
    forward     own forward ──> experts.3(rows) ──> its result
                            ──> experts.7(rows) ──> its result

A forward calls one expert after the other; to exchange at each call would let all ranks wait for
one. The rehearsal leaves random numbers, attributes, buffers and arguments as they were. What an
expert is given must not depend on results of others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.modules import generator_states, gpus_of
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.recompute.recomputed_state import Drawn
from lightning_shard.data_parallel.torch_private import in_backward, unobserved
from lightning_shard.data_parallel.units.units import class_name
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.exchange import ExpertCalls, Routes, told
from lightning_shard.expert_parallel.finding import ADVICE, Mixture
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor
from lightning_shard.tensor_parallel.trial import as_it_was, unchanged

Forward = Callable[..., Any]


class _ExpertCall(NamedTuple):
    """A call of an expert."""

    expert: int
    tokens: Tensor


class ListedExperts(ExpertCalls):
    """Calls of one module that has a list of experts, which W ranks share.

    With `in_pipeline` backwards ask for the gradients of some tensors only.
    """

    def __init__(
        self,
        mixture: Mixture,
        group: Collectives,
        *,
        in_pipeline: bool = False,
        is_dry: bool = False,
    ) -> None:
        super().__init__(mixture, group, is_dry=is_dry)
        self._in_pipeline = in_pipeline
        self._path = mixture.name.rpartition(".")[2]
        self._noted: list[_ExpertCall] | None = None  # while a rehearsal runs
        self._results: list[tuple[_ExpertCall, Tensor]] | None = None  # while a forward runs
        self._widths: dict[tuple[int, torch.dtype, bool], tuple[int, torch.dtype]] = {}

    def experts_of(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the experts of a module, or of a copy."""
        return list(module.get_submodule(self._path).children())

    def is_full(self, module: nn.Module) -> bool:
        """Whether a module, a copy say, has all experts."""
        return all(p.numel() for expert in self.experts_of(module) for p in expert.parameters())

    def whole(self, module: nn.Module, own: Forward) -> Forward:
        """Return the call of a module that has all experts."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with setting(self, is_own=True):
                return own(*args, **kwargs)

        return called

    def call(self, module: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any) -> Any:
        """Call a module with this rank's tokens; each rank must call."""
        drawn, random = Drawn(), _RandomState(module)
        with drawn.noting(), unchanged(module):
            noted, _ = self._rehearsed(own, args, kwargs)
        results, anchor = self._exchanged(module, noted, self._anchors(module, (args, kwargs)))
        with drawn.again(), random.again():
            result = self._performed(own, args, kwargs, noted, results)
        return result if anchor is None else _attached(result, anchor)

    def _anchors(self, module: nn.Module, arguments: Any) -> list[Tensor]:
        """Return tensors through one of which the backward of an exchange goes on each rank."""
        # A backward that asks for the gradients of some tensors only, as a pipeline's does, leaves
        # out what leads to none of them, and a rank may have no tokens that do.
        if not torch.is_grad_enabled():
            return [self.anchor.detach()]
        given = [one for one in tree_leaves(arguments) if _is_float(one) and one.requires_grad]
        if not given and self._in_pipeline:
            experts = {p for expert in self.experts_of(module) for p in expert.parameters()}
            given = [p for p in module.parameters() if p.requires_grad and p not in experts]
        return [self.anchor, *given]

    def alone(self, module: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any) -> Any:
        """Return a result of the right structure, shapes and formats; nothing is exchanged."""
        return self._rehearsed(own, args, kwargs)[1]

    def _rehearsed(
        self, own: Forward, args: Sequence[Any], kwargs: Any
    ) -> tuple[list[_ExpertCall], Any]:
        """Return the calls of experts, and what a forward makes of zeros as their results."""
        copies = tree_map_only(Tensor, _copied, (tuple(args), kwargs))
        noted: list[_ExpertCall] = []
        with setting(self, _noted=noted):
            return noted, own(*copies[0], **copies[1])

    def _performed(
        self, own: Forward, args: Any, kwargs: Any, noted: list[_ExpertCall], results: list[Tensor]
    ) -> Any:
        left = list(zip(noted, results, strict=True))[::-1]
        with setting(self, _results=left):
            result = own(*args, **kwargs)
        if left:
            raise self._differs(f"expert {left[-1][0].expert} was not called again")
        return result

    def expert_called(
        self, number: int, expert: nn.Module, own: Forward, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Stand in for the forward of an expert."""
        is_again = in_backward() and self._noted is None and self._results is None
        if self.is_own or is_again:  # what it was given is here, for a recomputation
            self._check_here(number, expert)
            return self.whole(expert, own)(*args, **kwargs)
        if self._noted is None and self._results is None:
            raise ConfigError(
                f"Rank {self._group.rank}: expert {number} of {self.mixture.name!r} was called "
                f"outside of the forward of {class_name(self.mixture.module)}, "
                f"expected calls there alone: ranks exchange the tokens of all experts at once. "
                f"{ADVICE}"
            )
        tokens = self._tokens(number, args, kwargs)
        if self._noted is not None:
            self._noted.append(_ExpertCall(number, tokens))
            return self._blank(tokens)
        return self._result(number, tokens)

    def _check_here(self, number: int, expert: nn.Module) -> None:
        """Refuse to compute with an expert of another rank, as a checkpoint within would."""
        if all(param.numel() for param in expert.parameters()):
            return
        raise ConfigError(
            f"Rank {self._group.rank}: expert {number} of {self.mixture.name!r}, which another "
            f"rank has, was called in a backward: the forward of "
            f"{class_name(self.mixture.module)} recomputes a part of itself. Expected checkpoints "
            f"around the mixture or in its experts. Use activation_checkpointing='full', or "
            f"checkpoint the blocks that have mixtures."
        )

    def _result(self, number: int, tokens: Tensor) -> Tensor:
        assert self._results is not None
        if not self._results:
            raise self._differs(f"expert {number} was called once more")
        call, result = self._results.pop()
        if call.expert != number or call.tokens.shape != tokens.shape:
            raise self._differs(
                f"expert {number} was called with {tuple(tokens.shape)}, and expert "
                f"{call.expert} with {tuple(call.tokens.shape)} before"
            )
        return result

    def _differs(self, how: str) -> ConfigError:
        return ConfigError(
            f"Rank {self._group.rank}: {class_name(self.mixture.module)}, which has "
            f"the experts {self.mixture.name!r}, ran twice with the same tokens and called other "
            f"experts the second time ({how}); expected a forward in which no expert's tokens "
            f"depend on another expert's results. {ADVICE}"
        )

    def _tokens(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim < 2:
            raise ConfigError(
                f"Rank {self._group.rank}: expert {number} of {self.mixture.name!r} is called "
                f"with ({told(given)}), expected one tensor of tokens, (..., H). {ADVICE}"
            )
        return given[0]

    def _blank(self, tokens: Tensor) -> Tensor:
        """Return zeros as an expert's result, which look computed."""
        width, dtype = self._width(tokens)
        zeros = torch.zeros((*tokens.shape[:-1], width), dtype=dtype, device=tokens.device)
        return zeros + self.anchor.sum().to(zeros)

    def _width(self, tokens: Tensor) -> tuple[int, torch.dtype]:
        """Return the features and the format of results, as an expert of this rank gives them."""
        mixed = torch.is_autocast_enabled(tokens.device.type)
        kind = tokens.shape[-1], tokens.dtype, mixed
        if kind not in self._widths:
            experts = self.experts_of(self.mixture.module)
            first = experts[self._group.rank * self._num_here]
            with unobserved(), torch.no_grad(), as_it_was(first):
                result = self.whole(first, first.forward)(tokens.new_zeros(1, tokens.shape[-1]))
            if not isinstance(result, Tensor) or result.shape[:-1] != (1,):
                raise ConfigError(
                    f"Rank {self._group.rank}: the experts {self.mixture.name!r} return "
                    f"{type(result).__name__}, expected a tensor with a row for each token. "
                    f"{ADVICE}"
                )
            self._widths[kind] = result.shape[-1], result.dtype
        return self._widths[kind]

    def _exchanged(
        self, module: nn.Module, noted: list[_ExpertCall], anchors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return results of the calls, if any rank has called, and what depends on all of them."""
        first = self._group.rank * self._num_here
        own = self.experts_of(module)[first : first + self._num_here]
        counts = self._counts(noted, next(module.parameters()).device)
        routes = self._routes(counts)
        about = routes.counts.flatten(0, 1).amax(0).tolist()[1:]
        width, code, follows = about[1:]
        if not width:
            return [], None
        self._note(module, routes)
        order = sorted(range(len(noted)), key=lambda at: noted[at].expert)
        flat = [noted[at].tokens.reshape(-1, width) for at in order]
        # in the graph without a token, too, as ranks exchange gradients together
        nothing = torch.zeros(0, width, dtype=_DTYPES[code], device=routes.counts.device)
        for one in anchors if follows else ():
            nothing = nothing + one.reshape(-1)[:0].sum().to(nothing)
        (received,) = routes.to_experts(torch.cat([*flat, nothing]))
        called = (routes.counts[..., 1].sum(0) > 0).tolist()
        results = self._computed(own, routes, received, called)
        (back,) = routes.to_tokens(results)
        parts = torch.split(back[: sum(map(len, flat))], [len(one) for one in flat])
        shaped = dict(zip(order, parts, strict=False))
        return [
            shaped[at].clone().view(*one.tokens.shape[:-1], back.shape[-1])
            for at, one in enumerate(noted)
        ], back[:0]

    def _computed(
        self, own: Sequence[nn.Module], routes: Routes, received: Tensor, called: Sequence[bool]
    ) -> Tensor:
        """Return the results of this rank's experts, in the order in which tokens came."""
        width, dtype = self._width(received)
        blank = received[:0].sum().to(dtype) + torch.zeros(
            0, width, dtype=dtype, device=received.device
        )
        results = [
            self.whole(expert, expert.forward)(tokens) if is_called else blank
            for expert, tokens, is_called in zip(
                own, routes.sorted_by_expert(received), called, strict=True
            )
        ]
        return torch.cat([routes.as_received(results), blank])

    def _counts(self, noted: list[_ExpertCall], device: torch.device) -> Tensor:
        """Return each expert's rows, if it was called, and what all tokens are like, (E, 5)."""
        # A rank that calls no expert learns from the others what tokens are like.
        counts = torch.zeros(self.mixture.num_experts, 5, dtype=torch.int64)
        for call in noted:
            counts[call.expert, 0] += call.tokens.shape[:-1].numel()
            counts[call.expert, 1] = 1
        kinds = {(one.tokens.shape[-1], one.tokens.dtype) for one in noted}
        if len(kinds) > 1 or any(dtype not in _DTYPES for _, dtype in kinds):
            raise ConfigError(
                f"Rank {self._group.rank}: experts of {self.mixture.name!r} are called with tokens "
                f"of {', '.join(f'{width} features in {dtype}' for width, dtype in kinds)}, "
                f"expected one kind of floating point. Leave expert_parallel_size out."
            )
        for width, dtype in kinds:
            follows = self._follows(noted)
            counts[:, 2:] = torch.tensor([width, _DTYPES.index(dtype), int(follows)])
        return counts.to(device)

    def _follows(self, noted: list[_ExpertCall]) -> bool:
        """Whether gradients go through the exchange: of tokens, or of any expert."""
        experts = self.experts_of(self.mixture.module)
        params = [param for one in experts for param in one.parameters()]
        leaves = [*(one.tokens for one in noted), *params]
        return torch.is_grad_enabled() and any(one.requires_grad for one in leaves)


class _RandomState:
    """The state of torch's generators, which is there again inside `again`."""

    def __init__(self, module: nn.Module) -> None:
        self._devices = gpus_of(module)
        self._state = generator_states(self._devices)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw inside what was drawn from the state on, and go on behind with what came since."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._state[0])
            for device, one in zip(self._devices, self._state[1:], strict=True):
                torch.cuda.set_rng_state(one, device)
            yield


def _copied(one: Tensor) -> Tensor:
    """Return an argument that a rehearsal may change in place."""
    return one.clone() if one.is_floating_point() else one


def _attached(result: Any, anchor: Tensor) -> Any:
    """Return a result whose backward goes through `anchor`, also where no expert was called."""
    first = next((one for one in tree_leaves(result) if _is_float(one)), None)
    if first is None or not anchor.requires_grad:
        return result
    part = first.part if isinstance(first, DimShardedTensor) else None
    tied = _Tied.apply(first if part is None else part.local, anchor)  # type: ignore[no-untyped-call]
    tied = tied if part is None else part.widen(tied)
    return tree_map_only(Tensor, lambda one: tied if one is first else one, result)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)  # which a recomputation has to come to on each rank
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
