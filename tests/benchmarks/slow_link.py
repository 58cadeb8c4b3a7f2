"""Step time over a slow link: dense, DDP with torch's hooks, and every way of sending less.

    python -m tests.benchmarks.slow_link [--megabits 100] [--only dense int8 ...]

Two ranks train 3.4 million parameters on two hosts: network namespaces, joined by a cable of 100
Mbit/s each way (`namespaces.py`). Where those cannot be made the ranks talk over loopback at its
own speed, and the title says so. Each contender has two processes of its own, since some of torch's
fail. Bytes are those of rank 0's interface, in both directions, with all headers.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDP
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_shard import DDPStrategy, LocalSGDStrategy, ZeRO1Strategy, ZeRO3Strategy
from lightning_shard.data_parallel.compression import OneBit, PowerSGD
from tests.benchmarks.contenders import ADAMW
from tests.benchmarks.model import Batch, build_model, make_batch
from tests.benchmarks.namespaces import two_hosts, why_not
from tests.processes import free_port
from tests.trainers import cpu_trainer

NUM_RANKS = 2
WARMUP_STEPS = 2  # the first steps of every contender are dense, or make connections
PERIOD = 50  # of local SGD and DiLoCo
TIMEOUT_SECONDS = 300
INTERFACES = Path("/proc/net/dev")


class HookedDDP(LightningDDP):
    """Lightning's DDP with a communication hook of torch, which Lightning applies on CUDA only."""

    def __init__(self, hook: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> None:
        super().__init__(process_group_backend="gloo")
        self._hook, self._state = hook, state

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(self._state(), self._hook)  # type: ignore[union-attr,operator]


def _power_sgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def _compressed(compression: Any, **options: Any) -> Callable[[], Any]:
    return lambda: DDPStrategy(backend="gloo", compression=compression, **options)


CONTENDERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: DDPStrategy(backend="gloo"),
    "dense_auto": lambda: DDPStrategy(backend="gloo", bucket_mb="auto"),
    "ddp": lambda: LightningDDP(process_group_backend="gloo"),
    "ddp_fp16": lambda: HookedDDP(default_hooks.fp16_compress_hook),
    "ddp_bf16": lambda: HookedDDP(default_hooks.bf16_compress_hook),
    "ddp_powersgd": lambda: HookedDDP(powerSGD_hook.powerSGD_hook, _power_sgd_state),
    "fp16": _compressed("fp16"),
    "fp16_3mb": _compressed("fp16", bucket_mb=3),  # of parameters: more than one bucket to overlap
    "bf16": _compressed("bf16"),
    "int8": _compressed("int8"),
    "topk": _compressed("topk"),
    "powersgd": _compressed(PowerSGD(rank=2)),
    "powersgd_bf16": _compressed(  # after 200 dense steps within 2 % of dense's loss
        PowerSGD(rank=6, warmup_steps=1, factor_dtype="bfloat16", adam=True)
    ),
    "onebit": _compressed(OneBit(warmup_steps=1)),
    "zero1_int8": lambda: ZeRO1Strategy(backend="gloo", compression="int8"),
    "zero3": lambda: ZeRO3Strategy(backend="gloo"),
    "zero3_wire": lambda: ZeRO3Strategy(
        backend="gloo", quantized_gathers="int8", compression="int4"
    ),
    "local_sgd": lambda: LocalSGDStrategy(backend="gloo", sync_every=PERIOD),
    "diloco": lambda: LocalSGDStrategy(
        backend="gloo", sync_every=PERIOD, outer_optimizer="nesterov"
    ),
}
PERIODIC = ("local_sgd", "diloco")


class Result(NamedTuple):
    """What one contender did: per step, or why it did not."""

    seconds: float = 0.0
    num_bytes: float = 0.0
    error: str = ""


class Model(L.LightningModule):
    """The benchmark's many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model("layers")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class Batches(Dataset[Batch]):
    """The benchmark's batches, made before the clock runs."""

    def __init__(self, rank: int, num_steps: int) -> None:
        self._batches = [make_batch(step, rank) for step in range(num_steps)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


class Clock(L.Callback):
    """Takes the time and the bytes from the end of the warm-up to the end of the fit."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.begin = (0.0, 0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == WARMUP_STEPS:
            trainer.strategy.barrier()
            self.begin = time.perf_counter(), bytes_over(self.interface)

    def per_step(self, num_steps: int) -> Result:
        """Return the mean over the steps since."""
        seconds, num_bytes = self.begin
        return Result(
            (time.perf_counter() - seconds) / num_steps,
            (bytes_over(self.interface) - num_bytes) / num_steps,
        )


def bytes_over(interface: str) -> int:
    """Return the bytes that an interface has received and sent."""
    for line in INTERFACES.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            values = counters.split()
            return int(values[0]) + int(values[8])
    raise LookupError(interface)


def run_rank(name: str, num_steps: int, interface: str) -> Result:
    """Train as one of the two ranks; the environment says which."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Clock(interface)
    trainer = cpu_trainer(
        devices=1,
        num_nodes=NUM_RANKS,
        strategy=CONTENDERS[name](),
        max_steps=WARMUP_STEPS + num_steps,
        callbacks=[clock],
        use_distributed_sampler=False,
    )
    batches = Batches(int(os.environ["RANK"]), WARMUP_STEPS + num_steps)
    loader = DataLoader(batches, batch_size=None)
    finished: list[Result] = []
    clock.on_train_end = lambda *_: finished.append(clock.per_step(num_steps))  # type: ignore[method-assign]
    trainer.fit(Model(), loader)
    return finished[0]


class Place(NamedTuple):
    """Where a rank runs: how its command begins, its interface, the address to meet at."""

    prefix: Sequence[str]
    interface: str
    address: str


@contextmanager
def places(megabits: float, reason: str | None) -> Iterator[tuple[Place, Place]]:
    """Make the two hosts, or take loopback for both."""
    if reason is not None:
        here = Place((), "lo", "127.0.0.1")
        yield here, here
        return
    with two_hosts(megabits) as (first, second):
        yield (
            Place(first.command(), first.interface, first.address),
            Place(second.command(), second.interface, first.address),
        )


def race(name: str, ranks: Sequence[Place], num_steps: int, folder: Path) -> Result:
    """Run one contender in two processes; return rank 0's figures."""
    port = free_port()
    outputs = [folder / f"{name}_{rank}.json" for rank in range(NUM_RANKS)]
    running = [
        subprocess.Popen(
            [*place.prefix, *_command(name, num_steps, outputs[rank])],
            env=os.environ | _environment(rank, place, port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(ranks)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_SECONDS)[1] for process in running]
    except subprocess.TimeoutExpired:
        return Result(error=f"no end within {TIMEOUT_SECONDS} s")
    finally:
        for process in running:
            process.kill()
            process.wait()
    failed = [error for error, process in zip(errors, running, strict=True) if process.returncode]
    if failed:
        return Result(error=failed[0].strip().splitlines()[-1])
    return Result(*json.loads(outputs[0].read_text()))


def _environment(rank: int, place: Place, port: int) -> Mapping[str, str]:
    """What torchrun would set on that host."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": NUM_RANKS,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": NUM_RANKS,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "slow_link",
        "GLOO_SOCKET_IFNAME": place.interface,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in variables.items()}


def _command(name: str, num_steps: int, output: Path) -> list[str]:
    module = [sys.executable, "-m", "tests.benchmarks.slow_link"]
    return [*module, "--rank-of", name, "--steps", str(num_steps), "--output", str(output)]


def render(title: str, results: Mapping[str, Sequence[Result]]) -> Table:
    """Lay the medians over the rounds out beside dense's."""
    table = Table("contender", "s / step", "of dense", "MB / step", "fewer bytes", title=title)
    seconds = {name: median(one.seconds for one in runs) for name, runs in results.items()}
    for name, runs in results.items():
        if error := next((one.error for one in runs if one.error), ""):
            table.add_row(name, f"does not run: {error}"[:60])
            continue
        num_bytes = median(one.num_bytes for one in runs)
        dense = median(one.num_bytes for one in results["dense"])
        table.add_row(
            name,
            f"{seconds[name]:.3f}",
            f"{seconds[name] / seconds['dense']:.3f}",
            f"{num_bytes / 1e6:.3f}",
            f"{dense / num_bytes:.1f}x",
        )
    return table


def main() -> None:
    """Run what the command line names, or be one of its ranks."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.slow_link")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--megabits", type=float, default=100)
    parser.add_argument("--steps", type=int, default=10, help="of those with a period, its length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        options.output.write_text(json.dumps(run_rank(options.rank_of, options.steps, interface)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the namespaces would stay
    reason = why_not()
    link = f"{options.megabits:g} Mbit/s between two network namespaces"
    if reason is not None:
        link = f"loopback, not throttled ({reason})"
    results: dict[str, list[Result]] = {}
    with places(options.megabits, reason) as ranks, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in dict.fromkeys(["dense", *options.only]):
                num_steps = PERIOD if name in PERIODIC else options.steps
                results.setdefault(name, []).append(race(name, ranks, num_steps, Path(folder)))
    Console(width=100).print(render(f"Two ranks, {link}", results))


if __name__ == "__main__":
    main()
