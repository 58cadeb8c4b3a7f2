"""A few dozen programs with fixed seeds, of which `make fuzz` runs more; how they are drawn."""

import pytest

from tests.fuzz.compare import first_difference
from tests.fuzz.features import FEATURES, drawn, fits, is_whole
from tests.fuzz.program import program
from tests.fuzz.run import DEFECT, EQUAL, UNFIT, Outcome, judged
from tests.fuzz.shrink import shrunk

SEEDS = range(6, 30)
SCHEMES = ("shard_ddp x2", "zero1 x2", "zero2 x4", "zero3 x2", "tensor x2", "pipeline x2")


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_trains_as_on_one_device_or_is_refused_by_name(seed: int) -> None:
    outcome = judged(tuple(drawn(seed)), seed, SCHEMES[seed % len(SCHEMES)])
    assert outcome.verdict not in (DEFECT, UNFIT), outcome.text


WERE_WRONG = [
    # What a step returned was a rank's part of the sequence where no block had made it full.
    ("heads by turns, positions and tokens, prediction after the fit", "context x2"),
    # Second derivatives left out what comes through the statistics of other ranks' samples.
    ("batch norm, gradient of the inputs", "zero2 x2"),
    # States that a hook had kept did not load.
    ("earlier state loaded in a hook", "tensor x data, stage 3 x4"),
    # What a hook had kept in inference mode was detached outside of it, which torch refuses.
    ("earlier state loaded in a hook, test after the fit", "pipeline x data, stage 3 x4"),
    # Hooks saw parts of weights that a step had left unsharded.
    ("histograms, manual optimization, token embedding", "tensor x data, stage 3 x4"),
    # Hooks read the vectors of other stages as they were before the fit.
    ("spectral norm in blocks, weights applied in a hook", "pipeline x4"),
    ("penalty over kept parameters", "tensor x2"),
    ("penalty over kept parameters, routed experts", "experts x2"),
    # Vectors of a power iteration moved in trials of a step, where a batch is left whole.
    ("ragged batch, spectral norm in blocks", "pipeline zero bubble x2"),
]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(("features", "scheme"), WERE_WRONG)
def test_a_program_that_was_wrong_trains_as_on_one_device(features: str, scheme: str) -> None:
    outcome = judged(tuple(features.split(", ")), 2, scheme)
    assert outcome.verdict == EQUAL, outcome.text


def test_what_stands_in_for_a_frozen_layer_is_asked_for_no_memory() -> None:
    """A step of another stage was refused, as if user code had asked for the layer's memory."""
    outcome = judged(("frozen layer", "positions and tokens"), 3, "pipeline x tensor x4")
    assert outcome.verdict == EQUAL, outcome.text


def test_there_are_at_least_sixty_features() -> None:
    assert len(FEATURES) >= 60


def test_a_seed_gives_the_same_features_and_the_same_script_each_time() -> None:
    for seed in range(50):
        assert drawn(seed) == drawn(seed)
        assert is_whole(drawn(seed))
        assert program(drawn(seed), seed) == program(drawn(seed), seed)


def test_a_feature_writes_the_same_whatever_stands_beside_it() -> None:
    alone = program(["norm of gradients", "Adam"], 3)
    beside = program(["norm of gradients", "Adam", "cross entropy"], 3)
    for line in ("note(self, 'norm of gradients'", "torch.optim.Adam(params"):
        assert line in alone
        assert line in beside


def test_two_features_of_one_slot_do_not_go_together() -> None:
    assert not fits("Adam", ["AdamW"])
    assert not is_whole(["attention"])  # it needs a sequence
    assert is_whole(["attention", "token embedding"])


def test_shrinking_leaves_the_features_that_matter() -> None:
    guilty = {"Adam", "cross entropy"}

    def judge(features: tuple[str, ...]) -> Outcome:
        return Outcome(DEFECT, "values: weight") if guilty <= set(features) else Outcome(EQUAL)

    features = (*guilty, "two epochs", "clipped norm", "batch in a dict", "last norm")
    assert set(shrunk(features, Outcome(DEFECT, "values: note"), judge)[0]) == guilty


def test_the_first_difference_is_told_by_name() -> None:
    import torch

    one = {"note 0: loss": torch.tensor(1.0), "weight a": torch.ones(2)}
    other = {"note 0: loss": torch.tensor(1.0), "weight a": torch.tensor([1.0, 1.1])}
    assert first_difference(one, one, 1e-8) is None
    assert "weight a: apart by 1.00e-01" in str(first_difference(one, other, 1e-8))
    assert "on ranks only" in str(first_difference({}, other, 1e-8))
