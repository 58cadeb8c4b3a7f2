"""What a host could still give to a process, by the files in which Linux says so."""

from pathlib import Path

from lightning_shard.backends.free_memory import free_host_bytes

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    500 kB\n"


def write_group(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def free(folder: Path, group: str = "0::/\n") -> int | None:
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "cgroup").write_text(group)
    return free_host_bytes(folder / "meminfo", folder / "cgroup", folder / "groups")


def test_without_limits_it_is_what_the_host_has(tmp_path: Path) -> None:
    write_group(tmp_path / "groups", "max", 100)
    assert free(tmp_path) == 500 * 1024


def test_a_limit_counts_with_what_the_cache_of_files_gives_back(tmp_path: Path) -> None:
    write_group(tmp_path / "groups", "100000", 60000, inactive_file=1000)
    assert free(tmp_path) == 41000


def test_the_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "groups" / "job", "2000", 500)
    write_group(tmp_path / "groups" / "job" / "rank", "9000", 100)
    assert free(tmp_path, "12:cpu:/other\n0::/job/rank\n") == 1500


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write_group(tmp_path / "groups", "1000", 1500)
    assert free(tmp_path) == 0


def test_a_system_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None
