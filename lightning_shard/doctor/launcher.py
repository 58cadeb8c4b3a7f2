"""Who has started this process, as its environment says, and whether that goes together."""

from collections.abc import Iterator

from lightning_shard import settings
from lightning_shard.doctor.finding import Finding, failure, ok, warning
from lightning_shard.errors import ConfigError

_BY_HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "LIGHTNING_SHARD_DEBUG": "ranks compare every call before they make it",
    "TORCH_DISTRIBUTED_DEBUG": "torch checks collectives",
    "CUDA_LAUNCH_BLOCKING": "a GPU's kernels run one by one",
    "NCCL_DEBUG": "NCCL logs",
}
_OFF = ("", "0", "OFF", "WARN")


def launcher() -> Iterator[Finding]:
    """Yield what the launcher's variables say."""
    found = [names for names in _candidates() if names is not None]
    for names in found:
        yield _placed(names)
    if not found:
        yield _without()
    if len({_rank(names) for names in found}) > 1:
        yield failure(
            "launchers",
            " and ".join(f"{names.launcher} says rank {_rank(names)}" for names in found),
            "One launcher inside another: start with one, or unset the variables of the outer one.",
        )
    yield from _job()
    slow = [name for name in _SLOW if settings.given(name) not in _OFF]
    for name in slow:
        yield warning(
            name,
            f"is {settings.given(name)}: {_SLOW[name]}",
            f"unset {name} for runs that should be fast.",
        )


def _candidates() -> Iterator[settings.LauncherVariables | None]:
    yield settings.TORCHRUN if settings.given("TORCHELASTIC_RUN_ID") else None
    yield settings.SLURM if settings.given(settings.SLURM.rank) else None
    yield settings.mpi_variables()


def _rank(names: settings.LauncherVariables) -> str:
    return settings.given(names.rank)


def _placed(names: settings.LauncherVariables) -> Finding:
    try:
        place = settings.placement(names)
    except ConfigError as error:
        return failure(names.launcher, str(error), f"Start with {names.start.format('N')}.")
    hosts = "" if place.num_nodes is None else f" on host {place.node_rank} of {place.num_nodes}"
    return ok(
        names.launcher,
        f"rank {place.rank} of {place.world_size}, local rank {place.local_rank}{hosts}",
    )


def _without() -> Finding:
    by_hand = [name for name in _BY_HAND if settings.given(name)]
    if not by_hand:
        return ok("launcher", "none: a Trainer starts the ranks of this host")
    return Finding(
        subject="launcher",
        state="ok" if len(by_hand) == len(_BY_HAND) else "warning",
        found=f"none that is known, but {', '.join(by_hand)} set by hand",
        advice=""
        if len(by_hand) == len(_BY_HAND)
        else f"unset {' '.join(by_hand)}, or set all of {', '.join(_BY_HAND)} for every rank.",
    )


def _job() -> Iterator[Finding]:
    try:
        job = settings.job()
    except ConfigError as error:
        yield failure("elastic job", str(error))
        return
    if job is not None:
        token = "with a token" if job.token else "without a token"
        yield Finding(
            subject="elastic job",
            state="ok" if job.token else "warning",
            found=f"{job.host}:{job.port}, {token}",
            advice="" if job.token else "Set LIGHTNING_SHARD_JOB_TOKEN; see docs/security.md.",
        )
