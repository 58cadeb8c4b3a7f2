"""A raw loop that trains the models of the parity tests as `tests.strategies.parity.train` does."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from tests.strategies.parity import ACCUMULATE, CLIP, GLOBAL_BATCH, SMALL_BUCKET_MB, Run, build

NUM_STEPS = 20


def fabric_of(strategy: Any, devices: int = 2, **options: Any) -> Fabric:
    """Return a Fabric on CPU ranks."""
    return Fabric(strategy=strategy, accelerator="cpu", devices=devices, **options)


def strategy_of(name: str, backend: str = "in_process", **options: Any) -> Any:
    """Return a strategy whose small blocks are units of their own."""
    from lightning_shard import fabric

    kinds = {
        "shard_ddp": fabric.DDPStrategy,
        "zero1": fabric.ZeRO1Strategy,
        "zero2": fabric.ZeRO2Strategy,
        "zero3": fabric.ZeRO3Strategy,
    }
    return kinds[name](backend=backend, bucket_mb=SMALL_BUCKET_MB, **options)


def raw_loop(
    fabric: Fabric, name: str, num_steps: int, clip: float = CLIP, jointly: bool = True
) -> Run:
    """Train a model for `num_steps` steps of `ACCUMULATE` micro-batches; each rank must call."""
    module = build(name)
    configured: Any = None
    if jointly:
        configured = module.configure_optimizers()
        model, optimizer = fabric.setup(module, configured["optimizer"])
    else:
        model = fabric.setup_module(module)
        configured = module.configure_optimizers()
        optimizer = fabric.setup_optimizers(configured["optimizer"])
    schedule = configured["lr_scheduler"]["scheduler"]
    data = module.data(GLOBAL_BATCH * ACCUMULATE * num_steps)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // fabric.world_size)
    losses, norms = [], []
    for number, batch in enumerate(fabric.setup_dataloaders(loader)):
        accumulates = (number + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = model.training_step(batch, number)
            fabric.backward(loss / ACCUMULATE)
        losses.append(fabric.all_reduce(loss.detach() / ACCUMULATE).item())
        if not accumulates:
            norms.append(fabric.clip_gradients(module, optimizer, max_norm=clip).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Run(losses=losses, norms=norms, weights=weights)


def run_of(strategy: Any, name: str, num_steps: int = NUM_STEPS, **options: Any) -> Run:
    """Train on the ranks of a launch."""
    loop = {key: options.pop(key) for key in ("jointly",) if key in options}
    fabric = fabric_of(strategy, **options)

    def train(fabric: Fabric) -> Run:
        return raw_loop(fabric, name, num_steps, **loop)

    return fabric.launch(train)


def assert_same(run: Run, expected: Run, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Compare two runs' losses, norms and weights."""
    close = torch.testing.assert_close
    for got, want in ((run.losses, expected.losses), (run.norms, expected.norms)):
        close(torch.tensor(got).double(), torch.tensor(want).double(), rtol=rtol, atol=0.0)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():
        close(
            weight, expected.weights[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
