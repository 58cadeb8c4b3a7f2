"""Full weights that a hook loads while ranks have shards of parts of layers."""

import pytest
import torch

from lightning_shard import HybridParallelStrategy
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()
GRIDS = {
    "tensor": LAYOUTS["tensor-4"],
    "pipeline": lambda: HybridParallelStrategy(
        backend="in_process",
        num_ranks=4,
        announce=False,
        pipeline_parallel_size=2,
        zero_stage=3,
        num_microbatches=2,
    ),
}


def other() -> Model:
    torch.manual_seed(5)
    return Model()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_full_weights_are_loaded_in_a_hook(grid: str, hook: str) -> None:
    """Full weights loaded in a hook met shards of parts."""
    full = {name: value.clone() for name, value in other().state_dict().items()}

    class Loading(Model):
        pass

    def load(module: Model, *_: object) -> None:
        if module.trainer.global_step == 0:
            module.load_state_dict(full)

    setattr(Loading, hook, load)
    torch.manual_seed(0)
    found = fit(GRIDS[grid](), Loading()).state_dict()
    expected = fit("auto", other()).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
