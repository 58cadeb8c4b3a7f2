"""The private names of torch that pipelines use.

`tests/pipeline_parallel/test_torch.py` fails when upstream changes them; checked with torch 2.11
and 2.13. Of torch's schedules only the order of the computations is taken: no stage, process group
or runtime of torch's is made. A step crosses this file as a plain (stage, kind, microbatch).
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import (
    stage_backward_input as stage_backward_input,
)
from torch.distributed.pipelining._backward import (
    stage_backward_weight as stage_backward_weight,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_shard.data_parallel.torch_private import set_aside

Step = tuple[int, str, int]
_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)
OF_COMPILER = ("_dynamo_", "_has_dynamo_", "_specialize_on")
"""How the names of attributes begin that `torch.compile` sets on tensors."""


def iterates_powers(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer is a vector that `spectral_norm`, the old or the new, iterates."""
    if isinstance(module, _SpectralNorm):
        return True
    hooks = module._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
    return buffer in [f"{name}_{vector}" for name in names for vector in "uv"]


def computed_before_forward(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return attributes that an old norm or `prune` computes in a hook, and of which parameter."""
    found = []
    for hook in module._forward_pre_hooks.values():
        name = getattr(hook, "_tensor_name" if isinstance(hook, BasePruningMethod) else "name", "")
        if isinstance(hook, _COMPUTING):
            end = "v" if isinstance(hook, WeightNorm) else "orig"
            found.append((name, module.get_parameter(f"{name}_{end}")))
    return found


def without_computing(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Call modules inside without the hooks of `computed_before_forward`."""
    every: Any = (one._forward_pre_hooks for one in modules if computed_before_forward(one))
    return set_aside(every, lambda hook: isinstance(hook, _COMPUTING))


_CLASSES: dict[str, type[_PipelineScheduleRuntime]] = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": schedules.ScheduleDualPipeV,
}


@dataclass
class _StageNumbers:
    """The attributes of a stage that a schedule's constructor reads."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None


def computations(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[Step | None]]:
    """Return what each rank computes, in order; None is a slot in which it waits."""
    # Without torch's messages: they are added later, to all schedules alike.
    body = {"_prepare_schedule_with_comms": lambda self, actions: None}
    stages = [_StageNumbers(num_stages, num_ranks) for _ in range(num_stages // num_ranks)]
    order = type("Order", (_CLASSES[name],), body)(stages, num_microbatches).pipeline_order
    return [
        [step for action in order[rank] for step in _steps(action)] for rank in range(num_ranks)
    ]


def add_messages(
    tables: Sequence[Sequence[Step | None]], stage_ranks: Sequence[int]
) -> list[list[Step]]:
    """Put the sends and receives between the computations of each rank.

    A send follows its computation; the receive is put at the end of what the peer has done by
    then. So one order of all steps fits every rank's list, and no order of waiting can be a circle.
    """
    lowered = _add_send_recv(
        {rank: [_action(step) for step in table] for rank, table in enumerate(tables)},
        stage_to_rank=lambda stage: stage_ranks[stage],
        num_stages=len(stage_ranks),
    )
    return [[_step(action) for action in lowered[rank]] for rank in range(len(tables))]


def _steps(action: _Action | None) -> list[Step | None]:
    if action is None:
        return [None]
    return [_step(part) for part in action.sub_actions or (action,)]


def _step(action: _Action) -> Step:
    assert action.microbatch_index is not None
    return action.stage_index, action.computation_type.value, action.microbatch_index


def _action(step: Step | None) -> Any:
    if step is None:
        return None
    stage, kind, microbatch = step
    return _Action(stage, _ComputationType(kind), microbatch)
