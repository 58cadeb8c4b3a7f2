"""A trial of whether layers may be split together: each rank's part runs on a copy, in turn.

    full      x ──> [ owner: ... up ── f ── down ... ] ──> y        the result of `down` is kept
    rank r    x ──> [ owner: ... up_r ─ f ─ down_r ╴╴ ] ──> y_r     the kept one takes its place

The split is right if the ranks' results of the last layer add up to the full one's, and all that
follows is the same. Nor may a gradient leave but through the entrance, where it is summed; the
parameters between the layers, such as a norm of each head, are found by theirs. Values are random,
the same on every rank. Layers get sequences, rows and images, since `h[:, 0]` is a position of one
and a feature of the other, in evaluation and, if that computes something else, in training. Where
an attention that looks full would gather a tensor first, that counts as wrong.
"""

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.comparing import is_close
from lightning_shard.core.modules import num_parameters, random_streams_kept
from lightning_shard.data_parallel.memory.flat_parameters import give_memory
from lightning_shard.data_parallel.torch_private import (
    forget_forward_hooks,
    in_backward,
    without_hooks,
)
from lightning_shard.data_parallel.units.unsharding import TracedHook
from lightning_shard.tensor_parallel.candidates import Candidate
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.rounded import unrounded
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.tensor_parallel.styles import STYLES, Style
from lightning_shard.tensor_parallel.wrappers import (
    bias_of,
    copies_in,
    has_adapter,
    inner_styles,
    linear_sizes,
    unsplit_style,
    wrapped_embedding,
)

_SHAPES = ((2, 6), (12,), (2, 3, 2))  # of the same inputs, without their last dimension
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_LARGEST = 16  # times the layers' own size: what is copied must not be the full model
_ROUNDING = 1e-5  # of the largest gradient, in one that is zero, as of a bias before a softmax
_TOLERANCE = 1e-4  # of the largest value; a wrong split is wrong by about as much as the values


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a trial."""

    is_right: bool | None
    inner: tuple[str, ...] = ()
    cause: str = ""

    def because(self, reason: str) -> str:
        """Say what the model's own code has raised in the trial."""
        return f"{reason}, which raised {self.cause}" if self.cause else reason


_WRONG = TrialResult(is_right=False)


def try_out(candidate: Candidate, num_ranks: int) -> TrialResult:
    """Run a candidate's layers unsplit, and in as many parts as there are ranks."""
    layers = [candidate.owner.get_submodule(name) for name in candidate.styles]
    is_large = num_parameters(candidate.owner) > _LARGEST * sum(map(num_parameters, layers))
    if is_large or any(map(_is_lightning_module, candidate.owner.modules())):
        return TrialResult(is_right=None)  # a copy of a LightningModule has a copy of its trainer
    shapes = _SHAPES[:1] if candidate.is_attention else _SHAPES
    with random_streams_kept(), torch.enable_grad(), without_hooks():
        try:
            trial = _Trial(candidate, num_ranks)
        except Exception as error:  # a module may refuse to be copied
            return TrialResult(is_right=None, cause=_quoted(error))
        results = [trial.with_inputs(shape) for shape in shapes]
    wrong = next((one for one in results if one.is_right is False), None)
    right = [one for one in results if one.is_right]
    if wrong or not right:
        return wrong or results[0]
    return TrialResult(
        is_right=True, inner=tuple({name: None for one in right for name in one.inner})
    )


def _is_lightning_module(module: nn.Module) -> bool:
    """Whether a module is a LightningModule of either package, neither of which is imported."""
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def try_table(table: nn.Embedding, num_ranks: int) -> TrialResult:
    """Look whether an embedding with a forward of its own gives the same split as unsplit."""
    return _try_alone(table, "embedding_rowwise", torch.arange(table.num_embeddings), num_ranks)


def _try_alone(layer: nn.Module, style: str, given: Tensor, num_ranks: int) -> TrialResult:
    """Compare what a bare copy of a layer makes of an input with what its parts make of theirs."""
    cuts_input, adds_up = style == "rowwise", style != "colwise"
    inputs = given.chunk(num_ranks, -1) if cuts_input else [given] * num_ranks
    parts = []
    try:
        with random_streams_kept(), torch.no_grad(), without_hooks():
            full = nn.ModuleDict({"layer": bare_copy(layer)})
            for rank, values in enumerate(inputs):
                part = copy.deepcopy(full)
                split_alone(part, {"layer": STYLES[style]}, Alone(rank, num_ranks))
                parts.append(part["layer"](values))
            expected = full["layer"](given)
        extra = (num_ranks - 1) * bias_of(full["layer"]) if cuts_input else 0  # each part has it
        joined = torch.stack(parts).sum(0) - extra if adds_up else torch.cat(parts, -1)
    except Exception as error:  # its forward may raise whatever it likes
        return TrialResult(is_right=False, cause=_quoted(error))
    return TrialResult(is_right=_is_same(joined, expected))


def _quoted(error: BaseException | None) -> str:
    """Return an error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _CannotRunError(Exception):
    """The owner raises on activations, which is the cause of this."""


class _WrongSplitError(Exception):
    """A layer's weight is used by itself, a layer several times, or a sharded tensor gathered."""


@dataclass(frozen=True)
class _Call:
    """How an owner is called: `owner`, as before each run, on inputs (*shape, width) or None."""

    owner: nn.Module
    out: str
    widths: Sequence[int | None]
    shape: tuple[int, ...]

    def run(self) -> "_Run":
        """Run a copy of the owner."""
        return _Run(self, copy.deepcopy(self.owner))

    def run_part(self, candidate: Candidate, full: "_Run", group: "Alone") -> "_Run":
        """Run one rank's part, in which the full run's result takes the last layer's place."""
        part = copy.deepcopy(self.owner)
        split_alone(part, candidate.styles, group, counts_heads=candidate.counts_heads)
        return _Run(self, part, stand_in=full.result.detach())


class _Run:
    """A run of an owner on random activations."""

    def __init__(self, call: "_Call", owner: nn.Module, stand_in: Tensor | None = None) -> None:
        self.call, self.owner = call, owner
        generator = torch.Generator().manual_seed(1)
        self._inputs = [
            torch.randn(*call.shape, width, generator=generator, requires_grad=True)
            for width in call.widths
            if width is not None
        ]
        given_inputs = iter(self._inputs)
        args = [None if width is None else next(given_inputs).clone() for width in call.widths]
        results: list[Tensor] = []

        def keep(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            results.append(result)
            return result.clone() if stand_in is None else stand_in.clone()

        with owner.get_submodule(call.out).register_forward_hook(TracedHook(keep)):
            given = owner(*args)
        if len(results) != 1:
            raise _WrongSplitError
        (self.result,) = results
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        self.given = [leaf.detach() for leaf in leaves]
        self._ends = [leaf for leaf in (self.result, *leaves) if leaf.requires_grad]

    def computes_as(self, other: "_Run") -> bool:
        """Whether another run has computed the same of the same inputs, whatever their shapes."""
        ours, theirs = (
            [one.flatten(0, -2) if one.ndim > 2 else one for one in (run.result, *run.given)]
            for run in (self, other)
        )
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))

    def leaves_out(self, layers: Iterable[str]) -> bool:
        """Whether a parameter outside the layers has no part in the owner's result."""
        others = [*self._others(layers).values()]
        starts = [torch.ones_like(end) for end in self._ends]
        grads = torch.autograd.grad(
            self._ends, others, starts, retain_graph=True, allow_unused=True
        ) if others else ()  # fmt: skip
        return any(grad is None for grad in grads)

    def _others(self, layers: Iterable[str]) -> dict[str, nn.Parameter]:
        inside = tuple(f"{name}." for name in layers)
        params = self.owner.named_parameters()
        return {name: one for name, one in params if not name.startswith(inside)}

    def gradients(self, layers: Sequence[str]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Differentiate the result by the inputs, and by the parameters outside the layers."""
        params = self._others(layers)
        generator = torch.Generator().manual_seed(2)
        direction = torch.randn(self.result.shape, generator=generator)
        sources = [*self._inputs, *params.values()]
        grads = torch.autograd.grad(
            self.result, sources, direction, allow_unused=True, materialize_grads=True
        )
        count = len(self._inputs)
        return list(grads[:count]), dict(zip(params, grads[count:], strict=True))


class _Trial:
    """Runs of a candidate's owner and of its parts, as far as no earlier run was the same."""

    def __init__(self, candidate: Candidate, num_ranks: int) -> None:
        self.candidate, self.num_ranks = candidate, num_ranks
        self._owner = bare_copy(candidate.owner)
        self._width = linear_sizes(self._owner.get_submodule(next(iter(candidate.styles))))[0]
        for param in self._owner.parameters():
            param.requires_grad_(True)
        self._right: list[_Run] = []

    def with_inputs(self, shape: tuple[int, ...]) -> TrialResult:
        """Try the layers with inputs of a shape, in evaluation and, if it differs, in training."""
        inner: tuple[str, ...] = ()
        try:
            for full in self._full_runs(shape):
                if any(map(full.computes_as, self._right)):
                    continue
                result = self._compare_parts(full)
                if not result.is_right:
                    return result
                inner += result.inner
                self._right.append(full)
            return TrialResult(is_right=True, inner=inner)
        except _CannotRunError as error:
            return TrialResult(is_right=None, cause=_quoted(error.__cause__))
        except _WrongSplitError:
            return _WRONG
        except Exception as error:  # the owner knows another way how wide its layers are
            return TrialResult(is_right=False, cause=_quoted(error))

    def _full_runs(self, shape: tuple[int, ...]) -> Iterator["_Run"]:
        full = self._run_full(shape)
        yield full
        owner = copy.deepcopy(self._owner).train()
        for module in owner.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
        call = dataclasses.replace(full.call, owner=owner)
        try:
            trained = call.run()
            is_new = not any(map(trained.computes_as, self._right))
            is_random = is_new and not trained.computes_as(call.run())
        except Exception:  # it may need what a trial lacks, such as a trainer
            return
        if is_new and not is_random:
            yield trained

    def _run_full(self, shape: tuple[int, ...]) -> "_Run":
        """Run the owner on activations, if need be without other arguments."""
        # An attention gets all arguments that it asks for, which might be something of each head.
        raised: list[Exception] = []
        others = _num_required(self._owner) - 1
        ways = (False, True) if others and not self.candidate.is_attention else (False,)
        for missing in ways:
            widths = [self._width, *[None if missing else self._width] * others]
            try:
                return _Call(self._owner, self.candidate.out, widths, shape).run()
            except _WrongSplitError:
                raise
            except Exception as error:
                raised.append(error)
        raise _CannotRunError from raised[0]

    def _compare_parts(self, full: "_Run") -> TrialResult:
        if self.candidate.is_attention and full.leaves_out(self.candidate.styles):
            return TrialResult(is_right=None)
        groups = (Alone(rank, self.num_ranks) for rank in range(self.num_ranks))
        parts = [full.call.run_part(self.candidate, full, group) for group in groups]
        return _compare(full, parts, self.candidate)


def _compare(full: _Run, parts: Sequence[_Run], candidate: Candidate) -> TrialResult:
    total = torch.stack([part.result.detach() for part in parts]).sum(0)
    bias = bias_of(full.owner.get_submodule(full.call.out))
    total = total - (len(parts) - 1) * bias  # each part has it
    # An attention may give its heads' weights as well.
    stop = 1 if candidate.is_attention else None
    follows = all(
        len(part.given) == len(full.given)
        and all(map(_is_same, part.given[:stop], full.given[:stop]))
        for part in parts
    )
    if not (follows and _is_same(total, full.result.detach())):
        return _WRONG
    return _compare_gradients(full, parts, list(candidate.styles))


def _compare_gradients(full: _Run, parts: Sequence[_Run], layers: Sequence[str]) -> TrialResult:
    """Find the parameters between the layers, whose gradients pass no entrance and add up."""
    _, expected = full.gradients(layers)
    found = [part.gradients(layers) for part in parts]
    if any(grad.any() for inputs, _ in found for grad in inputs):
        return _WRONG  # one leaves past the entrance
    inner: list[str] = []
    largest = max((grad.abs().max().item() for grad in expected.values()), default=0.0)
    for name, grad in expected.items():
        summed = torch.stack([params[name] for _, params in found]).sum(0)
        if not summed.any():
            continue
        if not _is_same(summed, grad, _ROUNDING * largest):
            return _WRONG  # used between the layers and elsewhere
        inner.append(name.rpartition(".")[0])
    return TrialResult(is_right=True, inner=tuple(dict.fromkeys(inner)))


def split_alone(
    owner: nn.Module, styles: Mapping[str, Style], group: "Alone", counts_heads: bool = False
) -> None:
    """Split layers of a module over a group of which only one rank exists."""
    layers = [
        PlannedLayer(
            name=name,
            module=owner.get_submodule(name),
            style=style,
            pattern=name,
            has_heads=counts_heads,
        )
        for name, style in styles.items()
    ]
    SplitModel(owner, layers, cast(Collectives, group))


class Alone:
    """Stands in for a group of which only one rank exists.

    Forward, a sum is that rank's part. Backward, gradients end where an entrance would sum them.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor, *, output: Tensor) -> "Alone":
        """Give the part as it is, or no gradient."""
        if in_backward():
            output.zero_()
        else:
            output.copy_(tensor)
        return self

    def all_gather(self, output: Tensor, tensor: Tensor) -> "Alone":
        """Give no gradient; forward, refuse: what has to be gathered is better left full."""
        if not in_backward():
            raise _WrongSplitError
        output.zero_()
        return self

    def wait(self) -> None:
        """Return at once."""


def _num_required(module: nn.Module) -> int:
    """Return the number of arguments that a module's forward requires, at least one."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in positional and one.default is one.empty]
    return max(1, len(required))


def bare_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU, with random values and without the user's hooks.

    Buffers on meta, such as a mask that a constructor has made there, are ones.
    """
    module = copy.deepcopy(module).float()
    for param in module.parameters():
        if param.is_meta:
            give_memory(param, torch.empty(param.shape))
    for owner in module.modules():
        lost = {
            name: one for name, one in owner._buffers.items() if one is not None and one.is_meta
        }
        owner._buffers |= {name: torch.ones_like(one, device="cpu") for name, one in lost.items()}
    for one in module.modules():
        unrounded(one)  # else parts would be rounded in another way
    module = module.cpu().eval()
    for one in module.modules():
        forget_forward_hooks(one)
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.data = values / max(1, param.shape[-1]) ** 0.5 if param.ndim > 1 else values
    return module


def _is_same(got: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    """Whether values are the same but for rounding, of which there may be `least` anyway."""
    return bool(got.isfinite().all()) and is_close(got, expected, _TOLERANCE, least)


def with_tried_wrappers(layers: Iterable[PlannedLayer], num_ranks: int) -> Iterator[PlannedLayer]:
    """Yield a plan's layers; wrappers that compute something else in parts get an unsplit style."""
    tried: dict[Any, TrialResult] = {}
    full: dict[str, list[str]] = {}
    for layer in layers:
        inner = inner_styles(layer.module, layer.style)
        module = layer.module
        if not has_adapter(module) or wrapped_embedding(module) or copies_in(module):
            yield layer
            continue
        key = _look(layer)
        if key not in tried:
            tried[key] = _try_wrapper(layer, num_ranks, has_layer=len(inner) > 1)
        if tried[key].is_right or num_ranks == 1:
            yield layer
            continue
        kind = f"{type(layer.module).__name__} around a linear layer that computes something else"
        full.setdefault(tried[key].because(f"{kind} in parts"), []).append(layer.name)
        yield dataclasses.replace(layer, style=unsplit_style(layer.style))
    for kind, names in full.items():
        rank_zero_warn(
            f"{names[0]!r} is a {kind}; it is computed full on each of the {num_ranks} "
            f"tensor-parallel ranks, as are {len(names) - 1} others. Low-rank "
            f"adapters of two linear layers are split."
        )


def _look(layer: PlannedLayer) -> Any:
    sizes = [(name, param.shape) for name, param in layer.module.named_parameters()]
    return type(layer.module), layer.style, tuple(sizes)


def _try_wrapper(layer: PlannedLayer, num_ranks: int, *, has_layer: bool) -> TrialResult:
    if not has_layer:
        return _WRONG
    width = linear_sizes(layer.module)[0]
    values = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1))
    style = "rowwise" if layer.style.form == "rowwise" else "colwise"
    return _try_alone(layer.module, style, values, num_ranks)
