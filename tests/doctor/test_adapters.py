"""What the system says of adapters."""

from pathlib import Path

import pytest

from lightning_shard.doctor import adapters


def port(folder: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    place = folder / name / "ports" / "1"
    place.mkdir(parents=True)
    (place / "rate").write_text(rate)
    (place / "state").write_text(state)


def test_infiniband_ports_that_are_up_count_together(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)\n")
    port(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)\n")
    port(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)\n", "1: DOWN")
    found = adapters.adapter_speed(tmp_path, tmp_path / "net")
    assert found is not None
    assert found[0] == 100e9


@pytest.mark.parametrize(("speed", "expected"), [("25000", 3.125e9), ("-1", None)])
def test_without_any_the_interface_outward_counts(
    speed: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "outward", lambda: ("eth7", "192.0.2.5"))
    (tmp_path / "eth7").mkdir()
    (tmp_path / "eth7" / "speed").write_text(speed)
    found = adapters.adapter_speed(tmp_path / "none", tmp_path)
    assert (None if found is None else found[0]) == expected
