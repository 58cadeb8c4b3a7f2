"""Versions that do not fit are named with the command that mends them."""

from importlib.metadata import PackageNotFoundError

import pytest

from lightning_shard.doctor import software


def versions(monkeypatch: pytest.MonkeyPatch, lines: list[str], **installed: str) -> list[str]:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(software, "requires", lambda _: lines)
    monkeypatch.setattr(software, "version", version)
    return [f"{one.state}: {one.found} {one.advice}" for one in software.software()][1:]


def test_what_is_missing_or_too_old_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", "rich>=13", "nothing>=2", 'ray>=2; extra == "ray"']
    assert versions(monkeypatch, lines, torch="2.9.1", rich="15.0") == [
        "failure: 2.9.1, expected >=2.11 pip install 'torch>=2.11'",
        "ok: 15.0 ",
        "failure: not installed pip install 'nothing>=2'",
    ]


def test_a_version_that_is_left_out_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = versions(monkeypatch, ["lightning>=2.6,!=2.6.2"], lightning="2.6.2")
    assert found.startswith("failure: 2.6.2, expected !=2.6.2,>=2.6")


def test_a_local_build_is_the_version_that_it_is_built_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert versions(monkeypatch, ["torch>=2.11"], torch="2.13.0+cpu") == ["ok: 2.13.0+cpu "]
