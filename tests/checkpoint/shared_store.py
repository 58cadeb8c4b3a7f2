"""A filesystem of fsspec's that other processes see, and that is none of this machine's by name."""

import os
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

_ROOT = "LIGHTNING_SHARD_TEST_STORE"


class Shared(DirFileSystem):
    """Files below a folder, `shared://...`."""

    protocol = "shared"

    def __init__(self, **options: Any) -> None:
        super().__init__(path=os.environ[_ROOT], fs=LocalFileSystem(), **options)


def open_store(folder: str) -> None:
    """Have `shared://` mean a folder, in this process."""
    os.environ[_ROOT] = folder
    fsspec.register_implementation("shared", Shared, clobber=True)
    Shared.clear_instance_cache()
