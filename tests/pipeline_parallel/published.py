"""The order of each schedule's computations, as published: rows are ranks, `|` begins one.

Stage and microbatch count from 0: `4B2` is stage 4, whole backward, microbatch 2. Where every rank
has one stage its number is left out. `published_rules` says how each is derived, and where a table
departs from what is published.
"""

from typing import NamedTuple


class Published(NamedTuple):
    """One table and where it stands."""

    name: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    text: str

    def rows(self) -> list[list[str]]:
        """Return for each rank its actions."""
        return rows_of(self.text)


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of each row."""
    return [row.split() for row in text.split("|")[1:]]


TABLES = (
    # arXiv:1811.06965, figure 2 (c).
    Published(
        "gpipe",
        4,
        4,
        1,
        """
        | F0 F1 F2 F3 B3 B2 B1 B0
        | F0 F1 F2 F3 B3 B2 B1 B0
        | F0 F1 F2 F3 B3 B2 B1 B0
        | F0 F1 F2 F3 B3 B2 B1 B0
        """,
    ),
    # PipeDream-Flush: arXiv:2006.09503; arXiv:2104.04473, figure 4, above.
    Published(
        "1f1b",
        4,
        8,
        1,
        """
        | F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
        | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
        | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
        | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        """,
    ),
    # arXiv:2104.04473, section 2.2.
    Published(
        "interleaved_1f1b",
        2,
        4,
        2,
        """
        | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """,
    ),
    # The same with one round.
    Published(
        "interleaved_1f1b",
        3,
        3,
        2,
        """
        | 0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2
        | 1F0 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 1B1 1B2
        | 2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2
        """,
    ),
    # arXiv:2104.04473, figure 4, below.
    Published(
        "interleaved_1f1b",
        4,
        8,
        2,
        """
        | 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0
          4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
        | 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1
          5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
        | 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2
          6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7
        | 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3
          7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
        """,
    ),
    # Breadth first, arXiv:2211.05953; the backwards newest first, as in GPipe, unlike the author's.
    Published(
        "looped_bfs",
        2,
        4,
        2,
        """
        | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0
        | 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0
        """,
    ),
    # The same on four ranks.
    Published(
        "looped_bfs",
        4,
        4,
        2,
        """
        | 0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B3 4B2 4B1 4B0 0B3 0B2 0B1 0B0
        | 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 5B3 5B2 5B1 5B0 1B3 1B2 1B1 1B0
        | 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6F3 6B3 6B2 6B1 6B0 2B3 2B2 2B1 2B0
        | 3F0 3F1 3F2 3F3 7F0 7F1 7F2 7F3 7B3 7B2 7B1 7B0 3B3 3B2 3B1 3B0
        """,
    ),
    # With one stage per rank: ZB-H1, arXiv:2401.10241, figure 3, above.
    Published(
        "interleaved_zero_bubble",
        4,
        8,
        1,
        """
        | F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        | F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        | F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        | F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
        """,
    ),
    # With two it is published nowhere: the order of interleaved_1f1b, and the Ws of ZB-H1.
    Published(
        "interleaved_zero_bubble",
        2,
        4,
        2,
        """
        | 0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3
          0I2 0W2 0I3 0W3
        | 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2
          3W3 1I3 1W2 1W3
        """,
    ),
    # sail-sg/zero-bubble-pipeline-parallelism, handcrafted_zb_v, at the sizes it is called with.
    Published(
        "zbv",
        4,
        8,
        2,
        """
        | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7
          0I0 0W0 7F4 7I4 7W4 0I1 0W1 7F5 7I5 7W5 0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7
          0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        | 1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4
          6I3 6W3 1F7 1I1 1W1 6F5 6I4 6W4 1I2 1W2 6F6 6I5 6W5 1I3 1W3 6F7 6I6 6W6 1I4 6I7
          1I5 1W4 1I6 1W5 1I7 1W6 6W7 1W7
        | 2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6
          2I1 2W1 5F5 5I3 5W3 2F7 2I2 2W2 5F6 5I4 5W4 2I3 2W3 5F7 5I5 5W5 2I4 5I6 2I5 5I7
          2I6 2W4 2I7 2W5 5W6 5W7 2W6 2W7
        | 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5
          4I2 4W2 3F6 3I2 3W2 4F6 4I3 4W3 3F7 3I3 3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7
          3I7 3W4 4W5 4W6 4W7 3W5 3W6 3W7
        """,
    ),
    # The eight steps of deepseek-ai/DualPipe, dualpipev.py; of a pair F is written before B.
    Published(
        "dual_pipe_v",
        2,
        4,
        2,
        """
        | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        """,
    ),
    # The same over 4 ranks, with 10 microbatches, the sizes of the figure in DualPipe's README.
    Published(
        "dual_pipe_v",
        4,
        10,
        2,
        """
        | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 0F7 7B3 7F4
          0B0 0F8 7B4 7F5 0B1 0F9 7B5 7F6 0B2 7B6 7F7 0B3 7B7 7F8 0B4 7B8 7F9 0B5 7B9 0I6
          0W6 0I7 0W7 0I8 0W8 0I9 0W9
        | 1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 1F6 6B2 6F4 1B0 1F7 6B3
          6F5 1B1 1F8 6B4 6F6 1B2 1F9 6B5 6F7 1B3 6B6 6F8 1B4 6B7 6F9 1B5 6B8 1B6 6I9 1I7
          6W9 1I8 1W7 1I9 1W8 1W9
        | 2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 2F5 5B1 5F4 2B0 2F6 5B2 5F5 2B1 2F7
          5B3 5F6 2B2 2F8 5B4 5F7 2B3 2F9 5B5 5F8 2B4 5B6 5F9 2B5 5B7 2B6 5B8 2I7 5I9 2I8
          2W7 2I9 5W9 2W8 2W9
        | 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 4F4 3B0 3F5 4B1 4F5 3B1 3F6 4B2 4F6 3B2
          3F7 4B3 4F7 3B3 3F8 4B4 4F8 3B4 3F9 4B5 4F9 3B5 4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9
          4W8 3W8 4W9 3W9
        """,
    ),
)

# The cells of two figures of arXiv:2401.10241, row by row: they show microbatches, from 1, only.
# Figure 3, above (ZB-H1), and figure 8 (ZB-V), without the next step's beginning.
FIGURES = {
    "interleaved_zero_bubble": """
        | 1 2 3 4 1 1 5 2 2 6 3 3 7 4 4 8 5 5 6 6 7 7 8 8
        | 1 2 3 1 4 2 1 5 3 2 6 4 3 7 5 4 8 6 5 7 6 8 7 8
        | 1 2 1 3 2 4 3 1 5 4 2 6 5 3 7 6 4 8 7 5 8 6 7 8
        | 1 1 2 2 3 3 4 4 1 5 5 2 6 6 3 7 7 4 8 8 5 6 7 8
        """,
    "zbv": """
        | 1 2 3 4 5 6 7 1 1 1 2 2 2 3 3 3 4 4 4 8 1 1 5 5 5 2 2 6 6 6 3 3 7 7 7 4 4 8 8 8 5 5 6 6
          7 7 8 8
        | 1 2 3 4 5 1 6 2 1 1 3 2 2 4 3 3 7 1 1 5 4 4 8 2 2 6 5 5 3 3 7 6 6 4 4 8 7 7 5 8 6 5 7 8
          8 6 7 8
        | 1 2 3 1 4 2 5 3 1 1 4 2 2 6 1 1 5 3 3 7 2 2 6 4 4 8 3 3 7 5 5 4 4 8 6 6 5 7 6 8 7 5 8 7
          6 8 7 8
        | 1 1 2 2 3 3 4 4 1 1 5 1 1 5 2 2 6 2 2 6 3 3 7 3 3 7 4 4 8 4 4 8 5 5 5 6 6 7 7 8 8 5 6 6
          7 7 8 8
        """,
}
