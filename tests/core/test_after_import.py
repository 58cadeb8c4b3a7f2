"""Something is called when a module has been imported, whoever imports it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_shard.core.registration import after_import

MakeModule = Callable[..., str]


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """Write a module of a given name and source; afterwards it is forgotten."""
    made = []

    def make(name: str, source: str = "") -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        made.append(name)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_it_is_called_at_once_for_a_module_that_is_imported() -> None:
    calls: list[str] = []
    after_import("sys", lambda: calls.append("now"))
    assert calls == ["now"]


def test_it_is_called_once_at_the_end_of_the_import(make_module: MakeModule) -> None:
    name = make_module("waited_for", "value = 1")
    calls: list[int] = []
    after_import(name, lambda: calls.append(sys.modules[name].value))
    assert calls == []
    importlib.import_module(name)
    importlib.reload(sys.modules[name])
    assert calls == [1]


def test_looking_for_the_module_is_no_import(make_module: MakeModule) -> None:
    name = make_module("looked_for")
    calls: list[str] = []
    after_import(name, lambda: calls.append("now"))
    assert importlib.util.find_spec(name) is not None
    assert calls == []
    importlib.import_module(name)
    assert calls == ["now"]


def test_the_module_has_its_own_loader_afterwards(make_module: MakeModule) -> None:
    name, plain = make_module("told_of"), make_module("not_told_of")
    after_import(name, lambda: None)
    module, other = importlib.import_module(name), importlib.import_module(plain)
    assert type(module.__loader__) is type(other.__loader__)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_an_import_that_fails_is_not_the_end(make_module: MakeModule) -> None:
    name = make_module("fails_first", "raise ValueError('mine')")
    calls: list[str] = []
    after_import(name, lambda: calls.append("now"))
    with pytest.raises(ValueError, match="mine"):
        importlib.import_module(name)
    assert calls == []
    make_module(name, "much = 'longer than before, so that no cache is taken for it'")
    importlib.import_module(name)
    assert calls == ["now"]


def test_a_module_that_does_not_exist_is_the_usual_error() -> None:
    after_import("there_is_no_such_module", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        importlib.import_module("there_is_no_such_module")
