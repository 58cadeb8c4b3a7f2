"""How a process comes to know its job's token."""

import errno
import os
import stat
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_shard.backends.authentication.token import find_token, host_key
from lightning_shard.core import settings
from lightning_shard.errors import ConfigError


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIGHTNING_SHARD_JOB_TOKEN", "LIGHTNING_SHARD_JOB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_users_key_is_made_once_and_is_for_this_user_alone(tmp_path: Path) -> None:
    key = host_key(tmp_path)
    assert len(key) == 32
    assert host_key(tmp_path) == key
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [file] = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"a folder that user .* alone may enter"):
        host_key(tmp_path)


def test_a_folder_without_room_is_an_error_that_says_so_and_holds_no_draft(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = r"No space left on device.*expected room.*LIGHTNING_SHARD_JOB_TOKEN"
    with patch.object(os, "link", side_effect=full), pytest.raises(ConfigError, match=message):
        host_key(tmp_path)
    [folder] = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    assert len(host_key(tmp_path)) == 32


def test_jobs_of_one_host_have_different_tokens_by_their_ports() -> None:
    one, other = (find_token(port, on_one_host=True, rank=0) for port in (1, 2))
    assert one != other
    assert one == find_token(1, on_one_host=True, rank=3)


def test_several_hosts_without_a_token_are_warned_of_by_rank_0_alone() -> None:
    with pytest.warns(UserWarning, match="several hosts without a token: anybody who reaches"):
        told = find_token(1, on_one_host=False, rank=0)
    assert find_token(1, on_one_host=False, rank=1) == told


def test_a_token_in_a_file_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        settings.job_token()
    file.write_text("a token in a file\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"-rw-r--r--; expected one .*chmod 600"):
        settings.job_token()
    file.chmod(0o600)
    assert settings.job_token() == "a token in a file"
    assert find_token(1, on_one_host=False, rank=0) == "a token in a file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        settings.job_token()
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", "short")
    with pytest.raises(ConfigError, match="holds 5 characters"):
        settings.job_token()
