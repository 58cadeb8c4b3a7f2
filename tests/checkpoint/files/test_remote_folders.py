"""A folder on an object store is complete with its index, and what it replaces is there until then.

The store fails for ever from an operation on, each in turn, as if the writer had been killed there.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import patch

import fsspec
import pytest

from lightning_shard.checkpoint.files import parts
from lightning_shard.checkpoint.files.new import new_file, new_folder, remove_remote
from lightning_shard.checkpoint.files.open_folder import (
    complete_folder,
    edition_in,
    verify_folder,
    write_checked,
)
from lightning_shard.checkpoint.files.parts import by_age, completed_at, part_of
from lightning_shard.checkpoint.files.places import names_in
from lightning_shard.errors import CheckpointError
from tests.checkpoint.files.mortal import NOBODY, Mortal

LAST = "mortal://run/last.ckpt"


@pytest.fixture(autouse=True)
def store() -> Iterator[Mortal]:
    fsspec.register_implementation("mortal", Mortal, clobber=True)
    Mortal.left = None
    Mortal.store.clear()
    Mortal.pseudo_dirs[:] = [""]
    yield fsspec.filesystem("mortal")
    Mortal.left = None


def save(text: str, path: str = LAST) -> None:
    with new_folder(path) as folder:
        names = [folder.named(name) for name in ("meta.pt", "__0_0.distcp", "__1_0.distcp")]
        sums = {name: write_checked(folder, name, text.encode()) for name in names}
        complete_folder(folder, f"{text} {names[-1]}".encode(), sums)


def save_until(operation: int, text: str) -> bool:
    """Save, as a process that is killed at an operation; return whether it came to its end."""
    Mortal.left = operation
    with patch.object(os, "getpid", lambda: NOBODY), suppress(KeyboardInterrupt):
        save(text)
        Mortal.left = None
        return True
    Mortal.left = None
    return False


def found(store: Mortal) -> str | None:
    """Return what is in the checkpoint, verified; None where none is complete."""
    if completed_at(LAST) is None:
        return None
    text, name = store.cat_file("/run/last.ckpt/.metadata").decode().split()
    verify_folder(LAST, edition=edition_in(name))
    assert store.cat_file(f"/run/last.ckpt/{name}").decode() == text
    return str(text)


@pytest.mark.parametrize("before", [None, "one"])
def test_a_checkpoint_that_is_replaced_outlives_a_killed_writer(
    before: str | None, store: Mortal
) -> None:
    """A checkpoint that was replaced was lost with its writer."""
    came_to_its_end, seen = False, set()
    for operation in range(200):
        Mortal.store.clear()
        Mortal.pseudo_dirs[:] = [""]
        if before is not None:
            save(before)
        came_to_its_end = save_until(operation, "two")
        seen.add(found(store))
        save("best", "mortal://run/best.ckpt")
        assert found(store) in (before, "two")
        assert set(names_in(store, "/run")) <= {"best.ckpt", "last.ckpt"}
        left = names_in(store, "/run/last.ckpt")
        editions = {edition_in(name) for name in left} - {""}
        assert len(editions) == (0 if found(store) is None else 1)
        if came_to_its_end:
            break
    assert came_to_its_end
    assert operation > 10
    assert seen == {before, "two"}


def test_one_edition_is_left_and_a_copy_of_what_others_read(store: Mortal) -> None:
    for text in ("one", "two"):
        save(text)
        kinds = sorted(
            name.split(".")[0] for name in names_in(store, "/run/last.ckpt") if name[0] != "."
        )
        assert kinds == ["__0_0", "__1_0", "checksums", "meta", "meta"]
        assert store.cat_file("/run/last.ckpt/meta.pt").decode() == text
        assert names_in(store, "/run") == ["last.ckpt"]


def test_a_save_that_raises_leaves_the_one_before(store: Mortal) -> None:
    def fail(path: str) -> None:
        with new_folder(path) as folder:
            write_checked(folder, folder.named("__0_0.distcp"), b"half")
            raise LookupError

    save("one")
    for path in (LAST, "mortal://run/new.ckpt"):
        with pytest.raises(LookupError):
            fail(path)
    assert found(store) == "one"
    assert names_in(store, "/run") == ["last.ckpt"]


def test_what_another_process_writes_stays(store: Mortal) -> None:
    def saving(name: str, pid: int, edition: str) -> None:
        with patch.object(os, "getpid", lambda: pid):
            marker = part_of(parts.Path("saving")).name
        store.pipe_file(f"/run/{marker}", f"{edition} {name}".encode())
        store.pipe_file(f"/run/{name}/__0_0.{edition}.distcp", b"half")

    saving("living.ckpt", os.getppid(), "0" * 8)
    saving("dead.ckpt", NOBODY, "1" * 8)
    with patch.object(parts, "home", lambda: "0" * 16):
        saving("elsewhere.ckpt", os.getppid(), "2" * 8)
        saving("silent.ckpt", os.getppid(), "3" * 8)
    for path, one in Mortal.store.items():
        if "silent" in path or (path.startswith("/run/.") and b"3333" in one.getvalue()):
            one.modified = one.modified.replace(year=2000)
    save("one")
    assert [one for one in names_in(store, "/run") if one[0] != "."] == [
        "elsewhere.ckpt", "last.ckpt", "living.ckpt",
    ]  # fmt: skip
    assert len([one for one in names_in(store, "/run") if one[0] == "."]) == 2


def test_files_of_others_are_not_replaced(store: Mortal) -> None:
    store.pipe_file("/run/last.ckpt/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        save("one")
    with pytest.raises(CheckpointError, match="holds other files"), new_file(LAST):
        pass
    assert store.cat_file("/run/last.ckpt/notes.txt") == b"mine"


def test_a_store_that_lists_a_folder_in_itself_has_no_files_of_others(store: Mortal) -> None:
    """A store that lists a folder in itself had files of others."""
    real = Mortal.ls

    def listing(self: Mortal, path: str, *args: object, **kwargs: object) -> list[str]:
        found: list[str] = real(self, path, *args, **kwargs)
        return [f"{path.rstrip('/')}/", *found]

    store.makedirs("/run/last.ckpt")
    with patch.object(Mortal, "ls", listing):
        assert names_in(store, "/run") == ["last.ckpt"]
        save("one")
    assert found(store) == "one"


def test_a_file_and_a_folder_take_each_others_place(store: Mortal) -> None:
    for _ in range(2):
        with new_file(LAST) as file:
            file.write(b"a file")
        assert store.cat_file("/run/last.ckpt") == b"a file"
        save("a_folder")
        assert found(store) == "a_folder"


def test_half_of_a_removed_folder_is_no_checkpoint(store: Mortal) -> None:
    """Half of a removed folder was a checkpoint."""
    save("one")
    gone = patch.object(Mortal, "rm", side_effect=OSError("the connection is gone"))
    with gone, pytest.raises(OSError, match="connection"):
        remove_remote(LAST)
    assert completed_at(LAST) is None
    assert by_age([LAST]) == []


def test_errors_of_a_client_are_told_by_the_checkpoints_name() -> None:
    class ClientError(Exception):
        """What a client of an object store raises."""

    with patch.object(Mortal, "_open", side_effect=ClientError("no such bucket")):
        for make in (new_file, new_folder):
            told = "was not saved: ClientError: no such bucket"
            with pytest.raises(CheckpointError, match=told), make(LAST):
                pass
