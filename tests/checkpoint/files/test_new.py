"""A file or a folder is there whole or not at all, and what was there before survives."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest

from lightning_shard.checkpoint.files import new, parts
from lightning_shard.checkpoint.files.new import new_file, new_folder
from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.checkpoint.files.parts import is_leftover, part_of
from lightning_shard.errors import CheckpointError

NOBODY = 2**22 + 7  # above the largest number of a process
MANY = 1 << 22


def write(path: object, text: str) -> None:
    with new_file(path) as file:
        file.write(text.encode())


def write_folder(path: object, text: str) -> None:
    with new_folder(path) as folder:
        Path(folder, "__0_0.distcp").write_text(text)
        Path(folder, ".metadata").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def left_by(pid: int, place: Path, *, before: bool = False) -> Path:
    """Return the name of what another process would be writing."""
    with patch.object(os, "getpid", lambda: pid):
        return part_of(place, before=before)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let this process write no larger file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_takes_its_place_whole(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "last.ckpt"
    write(place, "one")
    with new_file(str(place)) as file:
        file.write(b"tw")
        (part,) = (one for one in place.parent.iterdir() if one != place)
        assert place.read_text() == "one"
        assert part.name.startswith(".last.ckpt.")
        assert part.name.endswith(".part")
        assert is_leftover(part)
        assert not is_leftover(place)
        file.write(b"o")
    assert names(place.parent) == ["last.ckpt"]
    assert place.read_text() == "two"
    umask = os.umask(0)
    os.umask(umask)
    assert place.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_takes_the_place_of_another_and_of_a_file(tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    write(place, "a file")
    write_folder(place, "one")
    with new_folder(place) as folder:
        Path(folder, ".metadata").write_text("two")
        assert Path(place, "__0_0.distcp").read_text() == "one"
    assert names(place) == [".metadata"]
    write(place, "a file")
    assert place.read_text() == "a file"
    assert names(tmp_path) == ["last.ckpt"]


def test_without_an_exchange_a_folder_makes_room_for_the_next(tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    write_folder(place, "one")
    with patch.object(new, "exchange", lambda *_: False):
        write_folder(place, "two")
    assert Path(place, ".metadata").read_text() == "two"
    assert names(tmp_path) == ["last.ckpt"]


def test_a_folder_that_had_made_room_for_one_that_never_came_is_put_back(tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    write_folder(place, "one")
    place.rename(left_by(NOBODY, place, before=True))
    write(tmp_path / "other.ckpt", "")
    assert Path(place, ".metadata").read_text() == "one"


@pytest.mark.parametrize("save", [write, write_folder])
def test_a_save_that_raises_leaves_what_there_was(tmp_path: Path, save: object) -> None:
    place = tmp_path / "last.ckpt"
    (write if save is write else write_folder)(place, "one")
    before = [*place.rglob("*")] or place.read_text()
    with pytest.raises(LookupError), (new_file if save is write else new_folder)(place):
        raise LookupError
    assert ([*place.rglob("*")] or place.read_text()) == before
    assert names(tmp_path) == ["last.ckpt"]


def test_a_limit_of_file_sizes_is_told_by_name(tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    write(place, "one")

    def save() -> None:
        with new_file(place) as file:
            try:
                file.write(bytes(MANY))
            except OSError:
                raise RuntimeError("unexpected pos") from None  # as torch tells it

    told = r"last.ckpt was not saved: File too large \(EFBIG\)"
    with pytest.raises(CheckpointError, match=told), largest_file(MANY // 2):
        save()
    assert place.read_text() == "one"
    assert names(tmp_path) == ["last.ckpt"]


FILLS = """
import sys
from pathlib import Path
from lightning_shard.checkpoint.files.new import new_file, new_folder
from lightning_shard.errors import CheckpointError

place = Path(sys.argv[1], "last.ckpt")
with new_file(place) as file:
    file.write(b"one")
for make in (new_file, new_folder):
    try:
        with make(place) as new:
            file = new if make is new_file else open(new.path + "/a", "wb")
            with file:
                for _ in range(64):
                    file.write(bytes(1 << 16))
    except CheckpointError as error:
        assert "No space left on device (ENOSPC)" in str(error), error
    else:
        raise SystemExit("the filesystem took more than it has")
    assert place.read_bytes() == b"one"
    assert [one.name for one in place.parent.iterdir()] == ["last.ckpt"]
print("survived")
"""


@pytest.mark.slow
def test_a_full_filesystem_is_told_by_name(tmp_path: Path) -> None:
    mounts = (
        f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    )
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*own, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system lets nobody but root mount a small filesystem")
    done = subprocess.run([*own, mounts, FILLS], capture_output=True, text=True)
    assert done.stdout == "survived\n", done.stderr


def test_a_folder_that_nobody_may_write_to_is_told_by_name(tmp_path: Path) -> None:
    with (
        patch.object(Path, "mkdir", side_effect=PermissionError(errno.EACCES, "Permission denied")),
        pytest.raises(CheckpointError, match=r"Permission denied \(EACCES\).*writable"),
    ):
        write(tmp_path / "last.ckpt", "one")


def test_a_path_below_a_file_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for save in (write, write_folder):
        with pytest.raises(CheckpointError, match=r"was not saved: .*(ENOTDIR|EEXIST)"):
            save(tmp_path / "file" / "last.ckpt", "one")


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    (place / "thesis.tex").write_text("years")
    for save in (write, write_folder):
        with pytest.raises(CheckpointError, match="holds other files, expected a"):
            save(place, "one")
    assert names(place) == ["thesis.tex"]
    assert names(tmp_path) == ["data"]


def test_notes_in_a_folder_outlive_the_checkpoint_that_is_replaced(tmp_path: Path) -> None:
    """Notes in a folder went with the checkpoint that was replaced."""
    place = tmp_path / "last.ckpt"
    for content in (b"old", b"new"):
        with new_folder(place) as folder:
            for name in ("__0_0.distcp", "meta.pt", "checksums.json", ".metadata"):
                (Path(folder) / name).write_bytes(content)
        if content == b"old":
            (place / "__1_0.distcp").write_bytes(content)  # of more ranks
            (place / "notes.txt").write_text("mine")
            (place / "notes").mkdir()
            (place / "notes" / "more.txt").write_text("more")
            (place / "link").symlink_to("notes.txt")
    names = ["notes.txt", "notes", "link", "__0_0.distcp", "meta.pt", "checksums.json", ".metadata"]
    assert sorted(os.listdir(place)) == sorted(names)
    assert (place / "notes.txt").read_text() == (place / "link").read_text() == "mine"
    assert (place / "notes" / "more.txt").read_text() == "more"
    assert os.readlink(place / "link") == "notes.txt"


@pytest.mark.parametrize("found", [errno.ENOENT, errno.ENOTEMPTY])
def test_another_run_that_saves_to_the_same_place_ends_no_save(
    found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run that saved to the same place ended a save."""
    refusals = [OSError(found, os.strerror(found)) for _ in range(3)]
    exchange = new.exchange

    def races(one: Path, other: Path) -> bool:
        if refusals:
            raise refusals.pop()
        return exchange(one, other)

    monkeypatch.setattr(new, "exchange", races)
    for content in (b"old", b"new"):
        with new_folder(tmp_path / "last.ckpt") as folder:
            (Path(folder) / ".metadata").write_bytes(content)
    assert (tmp_path / "last.ckpt" / ".metadata").read_bytes() == b"new"
    assert not refusals
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "one")
    assert os.read(reader, 10) == b"one"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_folder_does_not_replace_a_pipe(tmp_path: Path) -> None:
    """A pipe or a device, such as /dev/null, was exchanged for a folder."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match=r"was not saved: Not a directory"):
        write_folder(pipe, "one")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_is_replaced_and_what_it_names_is_not(tmp_path: Path) -> None:
    write_folder(tmp_path / "best.ckpt", "best")
    for save in (write, write_folder):
        (tmp_path / "last.ckpt").unlink(missing_ok=True)
        (tmp_path / "last.ckpt").symlink_to("best.ckpt")
        save(tmp_path / "last.ckpt", "last")
        assert not (tmp_path / "last.ckpt").is_symlink()
        assert Path(tmp_path, "best.ckpt", ".metadata").read_text() == "best"


def test_leftovers_of_dead_writers_go_with_the_next_save_and_no_others(tmp_path: Path) -> None:
    place = tmp_path / "last.ckpt"
    dead, dead_folder = left_by(NOBODY, place), left_by(NOBODY, place)
    dead.write_text("half")
    dead_folder.mkdir()
    (dead_folder / "half").write_text("")
    living = left_by(os.getppid(), place)
    living.write_text("still being written")
    own = part_of(place)
    own.write_text("of another thread")
    (tmp_path / ".mine.part").write_text("a user's")
    with patch.object(parts, "home", lambda: "0" * 16):
        elsewhere, silent = part_of(place), part_of(place)
    elsewhere.write_text("on another host")
    silent.write_text("on a host that is gone")
    os.utime(silent, (0, 0))
    write(place, "one")
    assert names(tmp_path) == sorted(
        ["last.ckpt", ".mine.part", living.name, own.name, elsewhere.name]
    )


def a_checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", "meta.pt", INDEX_FILE):
        (path / name).write_text("first")
    return path


def killed_before_a_file_is_removed(folder: Path, **_: object) -> None:
    raise KeyboardInterrupt(folder)


def test_a_folder_whose_removal_is_killed_is_no_checkpoint(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path / "step=1.ckpt")
    with (
        patch.object(parts.shutil, "rmtree", killed_before_a_file_is_removed),
        pytest.raises(KeyboardInterrupt),
    ):
        parts.remove(path)
    assert not path.exists()
    assert all(map(is_leftover, os.listdir(tmp_path)))
    parts.remove(a_checkpoint(path))
    assert not path.exists()


def test_where_a_folder_cannot_be_renamed_its_index_goes_first(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path / "step=1.ckpt")
    with (
        patch.object(Path, "rename", side_effect=PermissionError),
        patch.object(parts.shutil, "rmtree", killed_before_a_file_is_removed),
        pytest.raises(KeyboardInterrupt),
    ):
        parts.remove(path)
    assert sorted(os.listdir(path)) == ["__0_0.distcp", "meta.pt"]


def test_a_long_name_is_no_longer_while_it_is_written(tmp_path: Path) -> None:
    place = tmp_path / ("ü" * 120 + ".ckpt")
    write(place, "one")
    assert names(tmp_path) == [place.name]


def test_an_object_is_there_when_all_of_it_is_written() -> None:
    filesystem = fsspec.filesystem("memory")
    write("memory://folder/last.ckpt", "one")
    with pytest.raises(TypeError), new_file("memory://folder/last.ckpt") as file:
        file.writelines([b"tw", "o"])
    assert filesystem.cat("/folder/last.ckpt") == b"one"
    with new_folder("memory://folder/sharded.ckpt") as folder:
        assert os.fspath(folder) == "memory://folder/sharded.ckpt"
        filesystem.pipe(f"{folder.path}/.metadata", folder.edition.encode())
    with pytest.raises(LookupError), new_folder("memory://folder/sharded.ckpt"):
        raise LookupError
    assert filesystem.exists("/folder/sharded.ckpt/.metadata")  # the one before
    filesystem.rm("/folder", recursive=True)
