"""A folder that is not as it was written loads nothing else: an error, or all that it held."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.checkpoint.by_rank import in_memory
from lightning_shard.checkpoint.sharded.entries import checkpoint_of
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_all
from lightning_shard.checkpoint.sharded.writing import verify_share
from lightning_shard.errors import CheckpointError
from tests.checkpoint.files.archives import damage, same
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit, saving
from tests.examples.commands import ignore_upstream_warnings

pytestmark = [
    *ignore_upstream_warnings,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
NUM_RANKS = 3
Damage = Callable[[Path, Path, random.Random], str]


def loaded(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return all that ranks would load of a folder, each of which compares its share."""
    folder = StoredFolder(path, weights_only)
    for rank in range(NUM_RANKS):
        verify_share(path, rank, NUM_RANKS, edition=folder.edition)
    checkpoint = checkpoint_of(folder, in_full=True)
    states = [read_all(one) for one in checkpoint.pop("optimizer_states")]
    return {**in_memory(checkpoint), "optimizer_states": states}


def damaged_content(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    what, content = damage(path.read_bytes(), rng)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def lost_file(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice([one for one in sorted(folder.iterdir()) if one.name != "checksums.json"])
    path.unlink()
    return f"{path.name} is gone"


def file_of_another(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    shutil.copyfile(other / path.name, path)
    return f"{path.name} is another checkpoint's"


def exchanged_files(folder: Path, other: Path, rng: random.Random) -> str:
    one, two = rng.sample(sorted(folder.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return f"{one.name} and {two.name} are exchanged"


KINDS: list[Damage] = [*[damaged_content] * 7, lost_file, file_of_another, exchanged_files]


def corrupt(tmp_path: Path, seed: int, times: int) -> int:
    """Damage a folder so many times; return how often it loaded, with what it had held."""
    rng = random.Random(seed)
    kept = saving(LAYOUTS["zero3-3"](checkpoint_format="sharded"), tmp_path / "kept")
    other = saving(
        LAYOUTS["zero3-3"](checkpoint_format="sharded"), tmp_path / "other", Model(dropout=0.1)
    )
    expected, num_loaded = loaded(kept), 0
    for number in range(times):
        folder = Path(shutil.copytree(kept, tmp_path / "damaged" / str(number)))
        what = rng.choice(KINDS)(folder, other, rng)
        try:
            assert same(loaded(folder, weights_only=rng.choice([True, False])), expected), what
            num_loaded += 1
        except CheckpointError:
            pass
        finally:
            shutil.rmtree(folder)
    return num_loaded


def test_damaged_folders_load_nothing_else(tmp_path: Path) -> None:
    assert corrupt(tmp_path, seed=0, times=60) < 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_damaged_folders_load_nothing_else(tmp_path: Path) -> None:
    assert corrupt(tmp_path, seed=1, times=2000) < 600


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_given_a_damaged_folder_ends_with_the_error_on_all_ranks(
    tmp_path: Path,
) -> None:
    rng = random.Random(2)
    kept = saving(LAYOUTS["zero3-3"](checkpoint_format="sharded"), tmp_path / "kept")
    expected = fit(LAYOUTS["zero3-3"](), ckpt_path=kept)
    for number in range(40):
        folder = Path(shutil.copytree(kept, tmp_path / str(number)))
        what = damaged_content(folder, kept, rng)
        try:
            assert fit(LAYOUTS["zero2-2"](), ckpt_path=folder).losses == pytest.approx(
                expected.losses, rel=1e-5
            ), what
        except CheckpointError:
            continue


@pytest.mark.parametrize("word", [b"relative_path", b"offsets", b"properties", b"fqn"])
def test_an_index_with_a_damaged_word_was_no_error_of_ours(word: bytes, tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(Path(__file__).parent / "format_3" / "zero3-3.ckpt", tmp_path / "a")
    )
    (folder / "checksums.json").unlink()
    index = (folder / ".metadata").read_bytes()
    assert word in index
    (folder / ".metadata").write_bytes(index.replace(word, word[:-1] + b"q"))
    with pytest.raises(CheckpointError, match=r"The index .* of a checkpoint is damaged"):
        StoredFolder(folder)
