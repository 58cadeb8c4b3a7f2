"""Which tensor a record of a checkpoint's file belongs to, for errors: nothing of it is run.

    archive/data/3    ─>    state_dict.layer.0.weight

The pickle is read with something inert in the place of every class and function.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from typing_extensions import override


def name_of_record(file: BinaryIO, record: str) -> str | None:
    """Return the path of keys to the tensor of a record; None where nobody can tell."""
    try:
        with zipfile.ZipFile(file) as archive:
            folder = record.partition("/")[0]
            content = _Reader(io.BytesIO(archive.read(f"{folder}/data.pkl"))).load()
        wanted = record.partition("/data/")[2]
        return next((path for path, key in _storages(content, "") if key == wanted), None)
    except Exception:  # the file is damaged, and more than the name is not there
        return None


class _Inert:
    """Stands for an object of any class: takes everything, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Inert":
        return _Inert()

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


class _Storage(str):
    """The number of the record that holds a tensor's elements."""

    __slots__ = ()


class _Reader(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module_name.startswith("torch") and global_name.startswith("_rebuild"):
            return lambda storage=None, *_: storage
        return _Inert

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        return _Storage(pid[2])


def _storages(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Storage):
        yield path, str(value)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _storages(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _storages(child, f"{path}.{index}" if path else str(index))
