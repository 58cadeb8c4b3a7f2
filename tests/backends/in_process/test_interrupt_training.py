"""Ctrl-C in the middle of a training run on in-process ranks."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard.backends.in_process.world import current_rank, current_world
from tests.backends.in_process.test_rank_globals import snapshot
from tests.trainers import cpu_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Interrupted(BoringModel):
    """Presses Ctrl-C on one rank in its third step, and then computes or goes on."""

    def __init__(self, rank_to_press: int, computes: bool) -> None:
        super().__init__()
        self.rank_to_press, self.computes = rank_to_press, computes
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if self.steps == 3 and current_rank() == self.rank_to_press:
            os.kill(os.getpid(), signal.SIGINT)
            while self.computes:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rank_to_press", [0, 1])
@pytest.mark.parametrize("computes", [False, True])
def test_ctrl_c_in_training(rank_to_press: int, computes: bool, tmp_path: Any) -> None:
    trainer = cpu_trainer(
        strategy="zero2_in_process", devices=2, max_steps=50, default_root_dir=tmp_path
    )
    model = Interrupted(rank_to_press, computes)
    before, handler = snapshot(), signal.getsignal(signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(model)
    assert current_world() is None
    assert signal.getsignal(signal.SIGINT) is handler
    assert snapshot() == before
    assert not torch.distributed.is_initialized()
    assert threading.current_thread() is threading.main_thread()


def test_ctrl_c_while_rank_0_computes() -> None:
    from lightning_shard.testing import run_ranks

    seen: list[Any] = [None] * 3

    def fn(rank: int) -> None:
        try:
            torch.distributed.barrier()
            if rank == 0:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
                while True:
                    torch.ones(8, 8) @ torch.ones(8, 8)
            torch.distributed.barrier()
        except BaseException as error:
            seen[rank] = type(error).__name__
            raise

    with pytest.raises(KeyboardInterrupt):
        run_ranks(fn, 3)
    assert seen == ["KeyboardInterrupt", "RankFailedError", "RankFailedError"]
    assert current_world() is None
