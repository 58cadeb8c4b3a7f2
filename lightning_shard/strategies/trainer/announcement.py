"""One line at the start of a fit: the strategy, the ranks, and the bytes that each will hold.

The bytes that an optimizer's state will take are estimated: an optimizer of the same class and
options takes a step on a parameter of a few elements. That is done for torch's own optimizers only,
as the step of another might do more than to update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard.checkpoint.misfits import StateTrials
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.held_bytes import HeldBytes, expected
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.optim.elementwise import is_of_torch

_LAUNCHERS = {
    "ElasticEnvironment": "started by an elastic job",
    "InProcessEnvironment": "threads of this process",
    "LSFEnvironment": "started by jsrun",
    "LightningEnvironment": "started by Lightning",
    "MPIEnvironment": "started by mpirun",
    "RayEnvironment": "started by Ray Train",
    "SLURMEnvironment": "started by srun",
    "TorchElasticEnvironment": "started by torchrun",
}


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of a full model's parameters that have shapes."""
    return sum(param.numel() for param in model.parameters() if not is_lazy(param))


def announce(strategy: Any, name: str, num_parameters: int) -> None:
    """Log the line on rank 0, as Lightning does its own; each rank must call."""
    mine, unknown = what_is_held(strategy.engine, strategy.optimizers)
    held = [mine]
    if strategy.engine.split.groups_of_layers:  # ranks have different layers
        held = strategy.collectives.all_gather_object(mine)
    unit = "rank" if strategy.mesh_size == 1 else "ranks"
    rank_zero_info(
        announcement(
            f"{name} on {strategy.mesh_size} {unit}",
            f"{strategy.backend.name}, {launcher_of(strategy.cluster_environment)}",
            num_parameters,
            held,
            [*(f"the state of {one}" for one in unknown), *strategy.held_besides],
            "" if strategy.bucket_choice is None else str(strategy.bucket_choice),
        )
    )


def what_is_held(
    engine: DataParallelEngine, optimizers: Sequence[Optimizer]
) -> tuple[HeldBytes, tuple[str, ...]]:
    """Return the bytes that this rank will hold, and the optimizers that they leave out."""
    shards = {
        param: _as_updated(flat, index, engine)
        for flat in engine.flats
        for index, param in enumerate(flat.params)
        if engine.split.is_here(param) and not engine.owners.gathered_elsewhere(param)
    }
    sizes = [expected_state_bytes(optimizer, shards) for optimizer in optimizers]
    unknown = {
        type(optimizer).__name__
        for optimizer, size in zip(optimizers, sizes, strict=True)
        if size is None
    }
    held = expected(engine)
    state = sum(size or 0 for size in sizes)
    if engine.copier is not None:
        return replace(held, offloaded=held.offloaded + state), tuple(sorted(unknown))
    return replace(held, optimizer_state=state), tuple(sorted(unknown))


def _as_updated(flat: FlatParameters, index: int, engine: DataParallelEngine) -> Tensor:
    """Return a tensor of the shape in which an optimizer updates a parameter on this rank."""
    param, shard = flat.params[index], flat.master_views[index]
    if not shard.numel():
        return shard
    if engine.owners.gathers(param):
        return shard.new_empty(()).expand(tuple(engine.full_shape(param)))
    return shard.view(flat.layout.slots[index].shape) if flat.is_owned else shard


def announcement(
    name: str,
    place: str,
    num_parameters: int,
    held: Sequence[HeldBytes],
    not_counted: Sequence[str] = (),
    buckets: str = "",
) -> str:
    """Write the line, with what was `not_counted`; `held` has one figure where all hold as much."""
    parts = ", ".join(
        f"{title} {_range([getattr(one, field) for one in held])}"
        for title, field in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer state", "optimizer_state"),
        )
    )
    total = _range([one.total for one in held])
    if any(one.offloaded for one in held):
        parts += f"; in host memory {_range([one.offloaded for one in held])}"
    besides = f"; not counted: {', '.join(not_counted)}" if not_counted else ""
    return (
        f"{name} ({place}): {num_parameters:,} parameters; each rank will hold {total}: "
        f"{parts}{besides}{f'; {buckets}' if buckets else ''}"
    )


def launcher_of(environment: ClusterEnvironment | None) -> str:
    """Return in words which launcher has started the ranks."""
    for kind in type(environment).__mro__:
        if kind.__name__ in _LAUNCHERS:
            return _LAUNCHERS[kind.__name__]
    return f"started as {type(environment).__name__} says"


def _range(sizes: Sequence[int]) -> str:
    """Return sizes in words: the least and the most where they differ by more than rounding."""
    least, most = min(sizes), max(sizes)
    if most - least <= 0.01 * most:
        return format_bytes(most)
    return f"{format_bytes(least)} to {format_bytes(most)}"


def expected_state_bytes(optimizer: Optimizer, shards: Mapping[nn.Parameter, Tensor]) -> int | None:
    """Return the bytes of an optimizer's state on this rank; None where no trial can tell."""
    total = 0
    for group in optimizer.param_groups:
        trials = StateTrials(optimizer, group, group)
        for param in group["params"]:
            shard = shards.get(param)
            if shard is None or shard.numel() == 0 or not param.requires_grad:
                continue
            if not is_of_torch(optimizer):
                return None
            found = trials.of(shard, shard.ndim).bytes_for(shard.numel())
            if found is None:
                return None
            total += found
    return total
