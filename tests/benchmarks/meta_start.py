"""A model that is built on meta, trained a step and saved in shards: memory, seconds, bytes.

    python -m tests.benchmarks.meta_start                       2 billion parameters, 4 ranks
    python -m tests.benchmarks.meta_start --ranks 8 --offload parameters
    python -m tests.benchmarks.meta_start --layers 4 --width 256 --normal

The ranks are threads of this process, so that its resident set is that of all of them. The model is
the example's GPT in bfloat16, updated by SGD without momentum. With `--leave` the run is left once
it has saved; else the fit ends as it ever does, with full parameters on rank 0 alone where those of
all ranks would not fit.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from examples.train_gpt import GPT
from lightning_shard import ZeRO3Strategy
from lightning_shard.core.reporting.output import format_bytes
from tests.trainers import cpu_trainer

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CONTEXT = 8


class PlainGPT(GPT):
    """The example's GPT without state of an optimizer."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saved(Exception):  # noqa: N818  (nothing went wrong)
    """Ends the run."""


class Phases(Callback):
    """Prints what has passed, how long it took and the most that was resident in it."""

    def __init__(self, leaves: bool) -> None:
        self._began = time.perf_counter()
        self._leaves = leaves

    def __deepcopy__(self, memo: object) -> "Phases":
        return Phases(self._leaves)

    def tell(self, name: str) -> None:
        seconds = time.perf_counter() - self._began
        peak, now = (format_bytes(resident(kind)) for kind in ("VmHWM", "VmRSS"))
        print(f"{name:<10} {seconds:8.1f} s   peak {peak:>11}   after it {now:>11}", flush=True)
        CLEAR_REFS.write_text("5")  # the high-water mark begins anew
        self._began = time.perf_counter()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            held = trainer.strategy.held_bytes().parameters
            self.tell("start")
            print(f"           each rank holds {format_bytes(held)} of parameters", flush=True)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.tell("step")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = trainer.strategy.broadcast(f"{folder}/step.ckpt")
            trainer.save_checkpoint(path, weights_only=True)
            if trainer.is_global_zero:
                self.tell("saving")
                size = sum(one.stat().st_size for one in Path(path).rglob("*"))
                print(f"           {format_bytes(size)} in {len(list(Path(path).iterdir()))} files")
            trainer.strategy.barrier()
        if self._leaves:
            raise Saved


def resident(kind: str) -> int:
    """Return bytes of this process's resident set: VmRSS now, VmHWM at the most."""
    line = next(one for one in STATUS.read_text().splitlines() if one.startswith(kind))
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, start, step and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--offload", choices=["optimizer", "parameters"])
    parser.add_argument("--normal", action="store_true", help="build the model on the CPU")
    parser.add_argument("--leave", action="store_true", help="do not end the fit")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*offload")
    L.seed_everything(7, verbose=False)
    warnings.filterwarnings("always", message="The fit leaves")
    phases = Phases(options.leave)
    trainer = cpu_trainer(
        strategy=ZeRO3Strategy(
            backend="in_process", checkpoint_format="sharded", offload=options.offload
        ),
        devices=options.ranks,
        precision="bf16-true",
        max_steps=1,
        callbacks=[phases],
    )
    phases.tell("imports")
    with trainer.init_module(empty_init=not options.normal):
        model = PlainGPT(
            context=CONTEXT, num_layers=options.layers, num_heads=4, width=options.width
        )
    phases.tell("building")
    print(f"           {sum(param.numel() for param in model.parameters()):,} parameters")
    text = torch.randint(256, (options.ranks, CONTEXT + 1))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    with suppress(Saved):
        trainer.fit(model, DataLoader(data, batch_size=1))
        phases.tell("end")
        full = sum(param.numel() for param in model.parameters() if param.ndim > 1)
        print(f"           {full:,} elements of matrices on rank 0", flush=True)


if __name__ == "__main__":
    main()
