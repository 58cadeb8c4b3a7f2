"""A fit may end with parameters in shards: saving, evaluating and going on work from there."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lightning_shard import ConfigError, ZeRO3Strategy
from lightning_shard.checkpoint import arriving
from lightning_shard.checkpoint.files import open_folder
from lightning_shard.strategies import fit_ends
from tests.checkpoint.sharded.runs import quiet_trainer
from tests.elastic.engines import assert_same
from tests.processes import ProcessesFailedError, run_processes
from tests.strategies.left_in_shards import (
    FULL_SCHEMES,
    SCHEMES,
    WeightsAtTheEnd,
    averaged,
    bytes_above,
    content,
    decided,
    fit_leaving_states,
    fit_twice,
    full_fit,
    given_up,
    left_fit,
    made,
    sent_at_the_end,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring()
CASES = [
    pytest.param(scheme, marks=() if scheme == "zero3" else pytest.mark.slow) for scheme in SCHEMES
]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CASES)
def test_a_fit_that_leaves_shards_saves_and_goes_on_as_one_that_gathers(
    scheme: str, tmp_path: Path
) -> None:
    num_ranks, _ = SCHEMES[scheme]
    found = run_processes(left_fit, num_ranks, scheme=scheme, folder=tmp_path, kind="full")
    expected = run_processes(full_fit, num_ranks, scheme=scheme, folder=tmp_path)
    left = content(tmp_path / "left.ckpt")
    assert_same(left, content(tmp_path / "full.ckpt"))
    assert_same(content(tmp_path / "again.ckpt"), left)
    assert_same(content(tmp_path / "resumed.ckpt"), content(tmp_path / "once.ckpt"))
    for rank in range(num_ranks):
        assert found[rank]["validated"] == expected[rank]["validated"]
        assert all("trainer.save_checkpoint" in one for one in found[rank]["refusals"])
        assert found[rank]["grown"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("scheme", FULL_SCHEMES)
def test_the_end_of_a_fit_up_to_stage_2_gathers_no_optimizer_state(
    scheme: str, kind: str, tmp_path: Path
) -> None:
    """The end of a fit up to stage 2 gathered optimizer state."""
    num_ranks, _ = FULL_SCHEMES[scheme]
    found = run_processes(fit_leaving_states, num_ranks, scheme=scheme, folder=tmp_path, kind=kind)
    expected = run_processes(full_fit, num_ranks, scheme=scheme, folder=tmp_path)
    left, full = content(tmp_path / "left.ckpt"), content(tmp_path / "full.ckpt")
    assert_same(left, full)
    assert_same(content(tmp_path / "again.ckpt"), left)
    edited = content(tmp_path / "edited.ckpt")
    assert_same(edited["optimizers"], left["optimizers"])
    head = "head.weight"
    assert_same(edited["weights"][head], left["weights"][head] + 1.0)
    assert_same(content(tmp_path / "resumed.ckpt"), content(tmp_path / "once.ckpt"))
    trained = sum(one["exp_avg"].numel() for one in full["optimizers"][0]["state"].values())
    num_copies = 2 if scheme.startswith("copies") else 1
    assert sum(one["held"] for one in found) == num_copies * trained
    assert max(one["held"] for one in found) < trained
    for one, other in zip(found, expected, strict=True):
        assert_same(one["weights"], dict(full["weights"]))
        assert one["validated"] == other["validated"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", CASES)
def test_a_second_fit_goes_on_from_shards(scheme: str) -> None:
    num_ranks, _ = SCHEMES[scheme]
    found = run_processes(fit_twice, num_ranks, scheme=scheme, left=True)
    expected = run_processes(fit_twice, num_ranks, scheme=scheme, left=False)
    for one, other in zip(found, expected, strict=True):
        assert_same(one[0], other[0])
        assert one[1] == other[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["zero3", "tensor-zero3", "hybrid-zero3"])
def test_a_fit_that_leaves_shards_saves_folders(scheme: str, tmp_path: Path) -> None:
    num_ranks, _ = SCHEMES[scheme]
    run_processes(left_fit, num_ranks, scheme=scheme, folder=tmp_path, kind="sharded")
    run_processes(full_fit, num_ranks, scheme=scheme, folder=tmp_path)
    assert (tmp_path / "left.ckpt" / ".metadata").exists()
    assert_same(content(tmp_path / "resumed.ckpt"), content(tmp_path / "once.ckpt"))


@pytest.mark.slow
def test_a_fit_that_leaves_shards_sends_no_parameter_at_its_end() -> None:
    size = sum(param.nbytes for param in made().parameters())
    assert max(run_processes(sent_at_the_end, 2, after_fit=False)) < size / 10
    assert min(run_processes(sent_at_the_end, 2, after_fit=True)) > size / 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_fit_that_leaves_shards_takes_at_most_a_unit_at_its_end(
    kind: str, tmp_path: Path
) -> None:
    unit, slack = 4 * 2**20, 8 * 2**20  # 64 MiB of parameters, 128 of Adam's state
    buffers = open_folder.NUM_BUFFERS * open_folder.BUFFER_BYTES + arriving.ARRIVING_BYTES
    for at_end, in_save in run_processes(
        bytes_above, 2, fresh=True, folder=tmp_path, left=True, kind=kind
    ):
        assert at_end < unit + slack
        assert in_save < unit + buffers + slack
    gathered = run_processes(bytes_above, 2, fresh=True, folder=tmp_path, left=False, kind="full")
    assert min(at_end for at_end, _ in gathered) > 8 * unit


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("scheme", "free", "leaves"),
    [
        ("zero3", (2**40, 100), True),
        ("zero3", (2**40, 2**40), False),
        ("zero3", (None, None), False),
        ("zero2", (100, 2**40), True),
        ("zero2", (2**40, 2**40), False),
    ],
)
def test_the_ranks_decide_together_whether_the_full_state_fits(
    scheme: str, free: Any, leaves: bool
) -> None:
    found = run_processes(decided, 2, free=free, scheme=scheme)
    assert [one["left"] for one in found] == [leaves, leaves]
    assert len(found[0]["told"]) == leaves
    assert not found[1]["told"]


def test_shards_are_let_go_of_with_their_strategy() -> None:
    for told, left in run_processes(given_up, 2):
        assert "whose strategy, which has its shards, is gone" in told
        assert left == [False, False]


def test_ranks_of_one_process_leave_no_shards() -> None:
    with pytest.raises(ConfigError, match=r"end with it; expected True or 'auto'"):
        ZeRO3Strategy(backend="in_process", full_parameters_after_fit=False)


@pytest.mark.parametrize("free", [2**40, 100])
def test_ranks_of_one_process_end_with_one_full_copy_where_all_would_not_fit(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_ends, "free_host_bytes", lambda: free)
    model, seen = made(), WeightsAtTheEnd()
    strategy = ZeRO3Strategy(backend="in_process", announce=False, bucket_mb=1e-3)
    context = pytest.warns(UserWarning, match="full parameters to rank 0 alone")
    with context if free == 100 else nullcontext():
        quiet_trainer(strategy, devices=3, max_steps=2, callbacks=[seen]).fit(model)
    reference = made()
    other = ZeRO3Strategy(backend="in_process", announce=False, full_parameters_after_fit=True)
    quiet_trainer(other, devices=3, max_steps=2).fit(reference)
    assert_same(model.state_dict(), reference.state_dict())
    held = [sum(one.untyped_storage().nbytes() for one in rank) for rank in seen.weights.values()]
    full = sum(param.nbytes for param in reference.parameters())
    others = full if free == 2**40 else 4 * len(list(model.parameters()))
    assert held == [full, others, others]
    shapes = [[one.shape for one in rank] for rank in seen.weights.values()]
    assert shapes[0] == shapes[1] == shapes[2]


def test_an_average_of_weights_is_full_after_the_fit() -> None:
    with pytest.raises(ProcessesFailedError, match=r"a callback averages weights"):
        run_processes(averaged, 2)
