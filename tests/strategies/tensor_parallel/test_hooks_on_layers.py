"""Hooks that user code puts on modules see of split layers what they see on one device."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader

from lightning_shard import TensorParallelStrategy
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()
WIDTH, STEPS = 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        mixed = self.weights(q @ k.transpose(-1, -2)) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.mlp(x)
        return result


class Watching(L.LightningModule):
    """Logs what its modules give, and trains what some of them gave, too."""

    def __init__(self, since: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 12)
        self.since, self.kept, self.seen = since, dict[str, Tensor](), dict[str, list[float]]()
        self.at("init")

    def at(self, place: str) -> list[Any]:
        names = {module: name for name, module in self.named_modules() if name}
        if place != self.since.removesuffix(", globally"):
            return []
        if "globally" in self.since:
            return [register_module_forward_hook(lambda *given: self.look(names, *given))]
        hooks = {module: partial(self.look, name) for module, name in names.items()}
        return [module.register_forward_hook(hook) for module, hook in hooks.items()]

    def look(self, names: Any, module: nn.Module, args: Any, result: Tensor) -> None:
        name = names if isinstance(names, str) else names.get(module)
        if name and self._trainer is not None:
            self.log(f"mean {name}", result.detach().mean())
            self.log(f"std {name}", args[0].detach().float().std(), on_step=True, on_epoch=True)
            self.kept[name] = result

    def configure_model(self) -> None:
        if "configure_model" in self.since and not self.kept:
            self.at("configure_model")

    def on_fit_start(self) -> None:
        self.handles = self.at("on_fit_start")

    def on_fit_end(self) -> None:
        for handle in self.handles:
            handle.remove()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        handles = self.at("training_step")
        x = self.tokens(batch)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        for handle in handles:
            handle.remove()
        distilled = [(one - 0.1).pow(2).mean() for one in self.kept.values()]
        self.log("loss", loss)
        return loss + 0.1 * sum(distilled)

    def on_train_batch_end(self, *_: Any) -> None:
        for name, value in self.kept.items():  # what was kept is full outside of the step, too
            self.seen.setdefault(name, []).append(float(value.detach().abs().sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(since: str, strategy: Any, devices: int = 1, **options: Any) -> tuple[Any, ...]:
    model = Watching(since)
    ids = (torch.arange(8 * 6 * STEPS) * 5 % 12).view(-1, 6)
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, max_steps=STEPS, log_every_n_steps=1, **options
    )
    trainer.fit(model, DataLoader(ids, batch_size=8 * max(1, devices) // devices))  # type: ignore[arg-type]
    return trainer.logged_metrics, model.seen, model.state_dict()


@cache
def on_one_device(since: str) -> tuple[Any, ...]:
    return fit(since, SingleDeviceStrategy(device="cpu"))


RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}
SCHEMES: dict[str, tuple[int, Callable[[], Any]]] = {
    "tensor": (2, lambda: TensorParallelStrategy(tensor_parallel_size=2, **RANKS)),
    "by sequence": (
        2,
        lambda: TensorParallelStrategy(tensor_parallel_size=2, sequence_parallel=True, **RANKS),
    ),
    "four": (4, lambda: TensorParallelStrategy(tensor_parallel_size=4, **RANKS)),
}
PLACES = ["init", "on_fit_start", "training_step", "configure_model"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("since", [*PLACES, "on_fit_start, globally", "training_step, globally"])
def test_what_hooks_log_and_keep_is_of_all_ranks(since: str, scheme: str) -> None:
    """A hook on a split layer, or on an activation behind it, got features of this rank."""
    num_ranks, make = SCHEMES[scheme]
    got = fit(since, make(), num_ranks)
    torch.testing.assert_close(got, on_one_device(since), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("since", ["never", "on_fit_start"])
def test_a_profilers_hooks_look_at_no_values(since: str, tmp_path: Path) -> None:
    """In process rank 0 alone has them: it made features full, and waited for the others."""
    profiler = PyTorchProfiler(tmp_path, "times", emit_nvtx=False, export_to_chrome=False)
    got = fit(since, SCHEMES["tensor"][1](), 2, profiler=profiler)
    expected = on_one_device(since)  # a key's bias has a gradient of rounding alone
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-4, atol=1e-5)
