"""A folder that is not as it was written loads nothing else: an error, or all that it held."""

import json
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from lightning_shard.checkpoint.by_rank import in_memory
from lightning_shard.checkpoint.conversion.consolidating import consolidate
from lightning_shard.checkpoint.conversion.loading import load_safetensors
from lightning_shard.checkpoint.conversion.source import describe, whole_checkpoint
from lightning_shard.checkpoint.sharded.entries import checkpoint_of
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_all, read_index
from lightning_shard.errors import CheckpointError
from tests.checkpoint.files.archives import damage, same
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit, saving
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")
NUM_RANKS = 3
WEIGHT = "state_dict.head.weight"
Damage = Callable[[Path, Path, random.Random], str]


def loaded(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return all that ranks would load of a folder, each of which compares its share."""
    folder = StoredFolder(path, weights_only)
    for rank in range(NUM_RANKS):
        folder.verify_share(rank, NUM_RANKS)
    checkpoint = checkpoint_of(folder, in_full=True)
    states = [read_all(one) for one in checkpoint.pop("optimizer_states")]
    return {**in_memory(checkpoint), "optimizer_states": states}


def damaged_content(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    what, content = damage(path.read_bytes(), rng)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def lost_file(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.iterdir()))
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
def test_an_index_with_a_damaged_word_is_a_checkpoint_error(word: bytes, tmp_path: Path) -> None:
    """An index with a damaged word was no error of ours."""
    folder = Path(
        shutil.copytree(Path(__file__).parent / "format_3" / "zero3-3.ckpt", tmp_path / "a")
    )
    (folder / "checksums.json").unlink()
    index = (folder / ".metadata").read_bytes()
    assert word in index
    (folder / ".metadata").write_bytes(index.replace(word, word[:-1] + b"q"))
    with pytest.raises(CheckpointError, match=r"The index .* of a checkpoint is damaged"):
        StoredFolder(folder)


def changed_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Write the folder's index anew, with the checksum that belongs to it."""
    index = read_index(folder)
    change(index)
    content = pickle.dumps(index)
    (folder / ".metadata").write_bytes(content)
    told = json.loads((folder / "checksums.json").read_text())
    told["files"][".metadata"] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (folder / "checksums.json").write_text(json.dumps(told))


def without_a_place(index: Any) -> None:
    del index.storage_data[next(at for at in index.storage_data if at.fqn == WEIGHT)]


def without_a_box(index: Any) -> None:
    index.state_dict_metadata[WEIGHT].chunks.pop()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a copy of a folder that an earlier version has written on three ranks."""
    source = Path(__file__).parent / "format_3" / "zero3-3.ckpt"
    return Path(shutil.copytree(source, tmp_path / "kept.ckpt"))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "fit": lambda kept, _: fit(LAYOUTS["zero2-2"](), ckpt_path=kept),
    "load_from_checkpoint": lambda kept, _: whole_checkpoint(kept, None, weights_only=True),
    "load_safetensors": lambda kept, _: load_safetensors(Model(), kept),
    "consolidate": lambda kept, tmp_path: consolidate(kept, tmp_path / "full.ckpt"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_without_its_checksums_is_incomplete(
    reader: str, kept: Path, tmp_path: Path
) -> None:
    """It loaded as one that somebody else has written, also with shards of another step."""
    (kept / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"not complete: checksums\.json is missing"):
        READERS[reader](kept, tmp_path)
    assert describe(kept)["missing"][0].startswith("checksums.json is missing")


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_part_is_named_before_anything_is_loaded(
    reader: str, kept: Path, tmp_path: Path
) -> None:
    """Each rank looked for its share of the files alone, and weights by themselves for none."""
    (kept / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"not complete: __1_0\.distcp is missing"):
        READERS[reader](kept, tmp_path)


@pytest.mark.parametrize("change", [without_a_place, without_a_box])
def test_an_index_that_lacks_a_part_is_refused_with_its_name(
    change: Callable[[Any], None], kept: Path, tmp_path: Path
) -> None:
    """What no box says stayed as the memory happened to be, or was a raw KeyError of torch."""
    changed_index(kept, change)
    for read in READERS.values():
        with pytest.raises(CheckpointError, match=f"lacks a part of '{WEIGHT}'"):
            read(kept, tmp_path)


def test_a_folder_of_somebody_else_needs_no_checksums_but_all_its_files(tmp_path: Path) -> None:
    """A file that its index names could be missing until a tensor of it was read."""
    state = {"state_dict": dict(Model().state_dict())}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.save(state, checkpoint_id=tmp_path / "theirs")
    loaded_state = whole_checkpoint(tmp_path / "theirs", None, weights_only=True)["state_dict"]
    assert loaded_state.keys() == state["state_dict"].keys()
    (tmp_path / "theirs" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"not complete: __0_0\.distcp is missing"):
        whole_checkpoint(tmp_path / "theirs", None, weights_only=True)
