"""Hooks of the fit that work with weights which are split, or on another stage."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard import ConfigError
from lightning_shard.errors import DeadlockError
from lightning_shard.strategies.trainer import weights_in_hooks
from tests.strategies.data_parallel.hooked import (
    STYLES,
    Edits,
    Hooked,
    Initialises,
    Reads,
    Teaches,
    assert_equal,
    both,
    fit,
    pipeline,
    replicas,
    tensor,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring()

alone: Any = cache(fit)


def test_modules_that_are_known_by_their_names_are_there() -> None:
    """One that moves would count as user code, without a word."""
    names = (*weights_in_hooks._PASSED_THROUGH, weights_in_hooks._OF_USERS)
    assert all(find_spec(name.rstrip(".")) is not None for name in names)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_hooks_had_a_rank_s_own_part_of_the_weights(style: type[Hooked], strategy: Any) -> None:
    assert_equal(fit(style, strategy()), alone(style))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [Initialises, Teaches])
def test_hooks_had_parts_of_some_layers_where_both_split_them(style: type[Hooked]) -> None:
    assert_equal(fit(style, both()), alone(style))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("style", [Edits, Reads])
def test_hooks_had_shards_of_some_layers_in_two_pipelines(style: type[Hooked]) -> None:
    assert_equal(fit(style, replicas()), alone(style))


class TeachesInSteps(Teaches):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other, 0.3)
        return super().training_step(batch, batch_idx)


def test_a_teacher_that_steps_update_stays_in_parts_until_the_end() -> None:
    assert_equal(fit(TeachesInSteps, tensor()), alone(TeachesInSteps))


def test_a_pipeline_that_is_asked_for_one_weight_after_the_other_raised_a_key_error() -> None:
    with (
        pytest.warns(UserWarning, match="outside of their stage"),
        pytest.raises(ConfigError, match=r"still asks for 'net\..*on_train_batch_end"),
    ):
        fit(TeachesInSteps, pipeline())


class Replaces(Hooked):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].layer = nn.Linear(8, 8).double()


class Misfits(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        self.blocks[1].layer.weight.data = torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (Replaces, r"Rank \d: the module that held .*blocks\.1\.layer\.weight.*load_state_dict"),
        (Misfits, r"Rank \d: a tensor of shape \(4, 4\).*blocks\.1\.layer\.weight.*\(8, 8\)"),
    ],
)
@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_what_cannot_be_cut_is_refused_by_name(
    style: type[Hooked], message: str, strategy: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(style, strategy())


class OnOneRank(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.see(self.blocks[1].layer.weight.norm())


@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_a_norm_that_one_rank_asks_for_is_no_silent_part(strategy: Any) -> None:
    with pytest.raises(DeadlockError):
        fit(OnOneRank, strategy())


class Saves(Hooked):
    """Saves in a hook, after it has changed weights in the same hook."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weight: Any = self.blocks[1].layer.weight
        view = weight.data
        view[0] = 0.25
        file = f"{self.trainer.default_root_dir}/own.ckpt"
        self.trainer.save_checkpoint(file)
        self.trainer.strategy.barrier()
        saved = torch.load(file, weights_only=True)["state_dict"]
        self.see(saved["net.blocks.1.layer.weight"].sum())


@pytest.mark.parametrize("strategy", [tensor, pipeline])
def test_a_checkpoint_has_what_its_hook_has_written_before(
    strategy: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saves, "options", {"default_root_dir": tmp_path})
    assert_equal(fit(Saves, strategy()), fit(Saves))
