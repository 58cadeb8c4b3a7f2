"""The grid of ranks as text, literally, and as a picture."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.mesh import AXES, ParallelMesh, abbreviated
from lightning_shard.core.reporting import output
from lightning_shard.errors import ConfigError


def drawing(mesh: ParallelMesh) -> str:
    return f"\n{mesh}\n"


def test_stages_replicas_and_ranks() -> None:
    assert (
        drawing(ParallelMesh(pp=2, dp=2, tp=2))
        == """
8 ranks: 2 stages (pp) x 2 replicas (dp) x 2 ranks to a layer (tp)

       stage 0      stage 1
      +-------+    +-------+
dp 0  |  0 1  | -> |  4 5  |
dp 1  |  2 3  | -> |  6 7  |
      +-------+    +-------+

pp groups, a pipeline each:     0 4 | 1 5 | 2 6 | 3 7
dp groups, of equal parameters: 0 2 | 1 3 | 4 6 | 5 7
tp groups, sharing each layer:  0 1 | 2 3 | 4 5 | 6 7
"""
    )


def test_an_order_shows_in_the_numbers() -> None:
    assert (
        drawing(ParallelMesh(dp=2, tp=3, axis_order=("tp", "pp", "dp")))
        == """
6 ranks: 1 stage (pp) x 2 replicas (dp) x 3 ranks to a layer (tp)

       stage 0
      +-------+
dp 0  | 0 2 4 |
dp 1  | 1 3 5 |
      +-------+

dp groups, of equal parameters: 0 1 | 2 3 | 4 5
tp groups, sharing each layer:  0 2 4 | 1 3 5
"""
    )


def test_parts_of_the_experts_are_rows() -> None:
    assert (
        drawing(ParallelMesh(dp=2, ep=2, tp=2))
        == """
8 ranks: 1 stage (pp) x 2 replicas (dp) x 2 parts of the experts (ep) x 2 ranks to a layer (tp)

            stage 0
           +-------+
dp 0 ep 0  |  0 1  |
dp 0 ep 1  |  2 3  |
dp 1 ep 0  |  4 5  |
dp 1 ep 1  |  6 7  |
           +-------+

dp groups, of equal parameters: 0 2 4 6 | 1 3 5 7
ep groups, sharing experts:     0 2 | 1 3 | 4 6 | 5 7
  of equal experts:             0 4 | 1 5 | 2 6 | 3 7
tp groups, sharing each layer:  0 1 | 2 3 | 4 5 | 6 7
"""
    )


def test_copies_of_the_state_are_drawn() -> None:
    """Copies of the state could not be seen."""
    assert (
        drawing(ParallelMesh(dp=4, tp=2, shard=2))
        == """
8 ranks: 1 stage (pp) x 4 replicas (dp) x 2 ranks to a layer (tp)

       stage 0
      +-------+
dp 0  |  0 1  |
dp 1  |  2 3  |
dp 2  |  4 5  |
dp 3  |  6 7  |
      +-------+

dp groups, of equal parameters: 0 2 4 6 | 1 3 5 7
  a copy of the state each:     0 2 | 1 3 | 4 6 | 5 7
  equal shards of the copies:   0 4 | 1 5 | 2 6 | 3 7
tp groups, sharing each layer:  0 1 | 2 3 | 4 5 | 6 7
"""
    )
    assert str(ParallelMesh(dp=4, shard=4)) == str(ParallelMesh(dp=4))


def test_one_rank_has_no_groups() -> None:
    assert (
        drawing(ParallelMesh())
        == """
1 rank: 1 stage (pp) x 1 replica (dp) x 1 rank to a layer (tp)

       stage 0
      +-------+
dp 0  |   0   |
      +-------+
"""
    )


def test_a_long_pipeline_is_abbreviated() -> None:
    assert (
        drawing(ParallelMesh(pp=12))
        == """
12 ranks: 12 stages (pp) x 1 replica (dp) x 1 rank to a layer (tp)

       stage 0      stage 1      stage 2      stage 3      stage 4     ...     stage 11
      +-------+    +-------+    +-------+    +-------+    +-------+           +--------+
dp 0  |    0  | -> |    1  | -> |    2  | -> |    3  | -> |    4  | -> ... -> |   11   |
      +-------+    +-------+    +-------+    +-------+    +-------+           +--------+

pp groups, a pipeline each:     0 1 ... 11
"""
    )


def test_thousands_of_ranks_are_abbreviated_on_each_axis() -> None:
    assert (
        drawing(ParallelMesh(pp=16, dp=32, tp=8))
        == """
4096 ranks: 16 stages (pp) x 32 replicas (dp) x 8 ranks to a layer (tp)

        stage 0                    stage 1                   ...     stage 15
       +---------------------+    +---------------------+           +---------------------+
dp 0   |    0    1  ...    7 | -> |  256  257  ...  263 | -> ... -> | 3840 3841  ... 3847 |
dp 1   |    8    9  ...   15 | -> |  264  265  ...  271 | -> ... -> | 3848 3849  ... 3855 |
dp 2   |   16   17  ...   23 | -> |  272  273  ...  279 | -> ... -> | 3856 3857  ... 3863 |
dp 3   |   24   25  ...   31 | -> |  280  281  ...  287 | -> ... -> | 3864 3865  ... 3871 |
dp 4   |   32   33  ...   39 | -> |  288  289  ...  295 | -> ... -> | 3872 3873  ... 3879 |
dp 5   |   40   41  ...   47 | -> |  296  297  ...  303 | -> ... -> | 3880 3881  ... 3887 |
...    |  ...  ...  ...  ... | -> |  ...  ...  ...  ... | -> ... -> |  ...  ...  ...  ... |
dp 31  |  248  249  ...  255 | -> |  504  505  ...  511 | -> ... -> | 4088 4089  ... 4095 |
       +---------------------+    +---------------------+           +---------------------+

pp groups, a pipeline each:     0 256 ... 3840 | 1 257 ... 3841 | ... | 255 511 ... 4095
dp groups, of equal parameters: 0 8 ... 248 | 1 9 ... 249 | 2 10 ... 250 | ... | 3847 3855 ... 4095
tp groups, sharing each layer:  0 1 ... 7 | 8 9 ... 15 | 16 17 ... 23 | ... | 4088 4089 ... 4095
"""
    )


@given(sizes=st.tuples(*[st.sampled_from([1, 2, 3, 5, 8, 16])] * 3), order=st.permutations(AXES))
def test_no_line_is_wider_than_a_terminal(sizes: tuple[int, int, int], order: list[str]) -> None:
    mesh = ParallelMesh(
        **dict(zip(AXES, sizes, strict=True)),
        axis_order=order,  # type: ignore[arg-type]
    )
    assert max(map(len, str(mesh).splitlines())) <= 100


@given(size=st.integers(1, 30), most=st.integers(3, 30))
def test_what_is_left_out_stands_between_the_first_and_the_last(size: int, most: int) -> None:
    items = abbreviated(range(size), most)
    assert len(items) == min(size, most)
    assert (items[0], items[-1]) == ("0", str(size - 1))
    assert items.count("...") == (size > most)


@pytest.mark.parametrize(
    "mesh", [ParallelMesh(), ParallelMesh(pp=2, dp=2, tp=2), ParallelMesh(pp=4, dp=64, tp=8)]
)
def test_a_png_is_written(mesh: ParallelMesh, tmp_path: Path) -> None:
    mesh.save_png(tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_picture_has_each_rank_in_its_place_and_the_colour_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    new_figure = output.new_figure

    def kept(*args: Any, **kwargs: Any) -> Any:
        drawn.append(new_figure(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr("lightning_shard.core.mesh.new_figure", kept)
    ParallelMesh(pp=2, dp=2, tp=2).save_png(tmp_path / "mesh.png", ranks_per_node=2)
    (axes,) = drawn[0].axes
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places == {
        "0": (0.5, 0.5), "1": (1.5, 0.5), "4": (3.5, 0.5), "5": (4.5, 0.5),
        "2": (0.5, 1.5), "3": (1.5, 1.5), "6": (3.5, 1.5), "7": (4.5, 1.5),
    }  # fmt: skip
    nodes = axes.collections[0].get_array().filled(-1).tolist()
    assert nodes == [[0, 0, -1, 2, 2, -1], [1, 1, -1, 3, 3, -1]]
    assert axes.get_title().splitlines() == [
        "8 ranks: 2 stages (pp) x 2 replicas (dp) x 2 ranks to a layer (tp)",
        "a colour per node of 2 ranks",
    ]


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"mesh.png cannot be drawn: .*lightning-shard\[plots\]'"):
        ParallelMesh().save_png(tmp_path / "mesh.png")
    assert not (tmp_path / "mesh.png").exists()
