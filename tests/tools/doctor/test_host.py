"""What a host lacks is said with what to do."""

import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_shard.tools.doctor import host
from lightning_shard.tools.doctor.finding import Finding, size

Usage = namedtuple("Usage", "total used free")


def finding(subject: str) -> Finding:
    return next(one for one in host.host() if one.subject == subject)


def test_a_small_shared_memory_is_told_with_the_option_of_docker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    found = finding("shared memory")
    assert (found.state, found.found) == ("warning", "/dev/shm: 64 MiB free of 64 MiB")
    assert "--shm-size" in found.advice


def test_a_clock_that_nobody_sets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: 5)
    assert finding("clock").state == "warning"
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: 0)
    assert finding("clock").state == "ok"
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: None)
    assert finding("clock").state == "absent"


def test_few_open_files_are_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524288))
    assert "ulimit -n 65536" in finding("open files").advice


def test_a_directory_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    assert finding("this directory").state == "failure"
    assert not list(tmp_path.iterdir())


def test_a_file_server_with_another_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "_replaced_file", lambda _: -90.0)
    assert "differs from this host's by -90.0 s" in finding("its clock").found


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.memory_bytes()
    (tmp_path / "memory.max").write_text("1048576\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert host.memory_bytes() == 2**20 < whole
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory_bytes() >= whole
    assert size(host.memory_bytes()) in finding("memory").found


def test_sizes_are_in_the_largest_unit() -> None:
    assert [size(one) for one in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 TiB"]
