"""The rules by which the published schedules are made, for any size.

They are written from the papers and from what the authors say of their own programs, not from the
code that makes this package's tables, so that the two can be compared. Each computation takes the
next microbatch of its chunk (the rank's first stage is chunk 0, its second chunk 1): `F0 I1 W` is a
forward of chunk 0, a backward of the inputs of chunk 1, and the oldest backward of weights that is
left; `W1` is the oldest one of chunk 1.

    gpipe                     arXiv:1811.06965, figure 2 (c)
    1f1b                      arXiv:2104.04473, section 2.2.1
    interleaved_1f1b          arXiv:2104.04473, section 2.2.2, with Megatron-LM's forwards ahead
    looped_bfs                arXiv:2211.05953, and its author's program, ServiceNow/Fast-LLM
    interleaved_zero_bubble   ZB-H1, arXiv:2401.10241, section 2.1
    zbv                       sail-sg/zero-bubble-pipeline-parallelism, handcrafted_zb_v
    dual_pipe_v               the eight steps of deepseek-ai/DualPipe, dualpipev.py

Where the tables depart from what is published:

- looped_bfs: the author's backwards take the oldest microbatch first, these the newest, as GPipe.
  The forwards, the order of the stages and what is held at most are the same.
- interleaved_zero_bubble is published for one stage per rank. With more it is not: here it is the
  order of interleaved_1f1b, with its Ws as late as in ZB-H1.
- zbv: the authors' program and the figure of their paper do the last Ws in another order, at the
  same places. The tables have the program's.
- interleaved schedules are published for multiples of p microbatches only.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

Step = tuple[int, str, int]  # stage, kind, microbatch
Rule = Callable[[int, int, int, int], list[Step]]  # of rank, ranks, microbatches, stages per rank


class _Row:
    """What one rank does, written phase by phase."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.steps: list[Step] = []
        self._stages = stages
        self._done: Counter[tuple[bool, int]] = Counter()
        self._weights: list[tuple[int, int]] = []  # chunk and microbatch of each W that is left

    def phase(self, times: int, kinds: str) -> None:
        """Do `kinds`, and again, so many times in all."""
        for kind, *chunk in kinds.split() * times:
            if kind == "W":
                self._weight(*map(int, chunk))
            else:
                self._next(kind, int(*chunk))

    def _next(self, kind: str, chunk: int) -> None:
        microbatch = self._done[kind == "F", chunk]
        self._done[kind == "F", chunk] += 1
        self.steps.append((self._stages[chunk], kind, microbatch))
        if kind == "I":
            self._weights.append((chunk, microbatch))

    def _weight(self, *chunks: int) -> None:
        oldest = next(one for one in self._weights if not chunks or one[0] in chunks)
        self._weights.remove(oldest)
        self.steps.append((self._stages[oldest[0]], "W", oldest[1]))


def _gpipe(rank: int, p: int, m: int, v: int) -> list[Step]:
    backwards = [(rank, "B", i) for i in reversed(range(m))]
    return [(rank, "F", i) for i in range(m)] + backwards


def _breadth_first(rank: int, p: int, m: int, v: int) -> list[Step]:
    """All microbatches go through a chunk before any goes through the next."""
    row = _Row(range(rank, p * v, p))
    for chunk in range(v):
        row.phase(m, f"F{chunk}")
    for chunk in reversed(range(v)):
        row.phase(m, f"B{chunk}")
    return row.steps


def _one_forward_one_backward(
    stages: Sequence[int], forwards: Sequence[int], backwards: Sequence[int], ahead: int
) -> list[Step]:
    """Some forwards ahead, then one forward and one backward in turn; given are their chunks."""
    backs = [f"B{chunk}" for chunk in backwards]
    forths = [f"F{chunk}" for chunk in forwards]
    pairs = chain.from_iterable(zip(forths[ahead:], backs, strict=False))
    row = _Row(stages)
    row.phase(1, " ".join([*forths[:ahead], *pairs, *backs[len(forths[ahead:]) :]]))
    return row.steps


def _1f1b(rank: int, p: int, m: int, v: int) -> list[Step]:
    return _one_forward_one_backward([rank], [0] * m, [0] * m, p - 1 - rank)


def _interleaved(rank: int, p: int, m: int, v: int, hop: int = 2) -> list[Step]:
    """1F1B in which p microbatches go through a chunk, then through the next."""

    def rounds(chunks: Iterable[int]) -> list[int]:
        return [chunk for chunk in chunks for _ in range(p)] * (m // p)

    ahead = (v - 1) * p + hop * (p - 1 - rank)
    forwards, backwards = rounds(range(v)), rounds(reversed(range(v)))
    return _one_forward_one_backward(range(rank, p * v, p), forwards, backwards, ahead)


def _zero_bubble(rank: int, p: int, m: int, v: int) -> list[Step]:
    """1F1B of halves; Ws are as many backwards late as it takes for all ranks to hold the same."""
    steps: list[Step] = []
    weights: list[Step] = []
    for stage, kind, i in _interleaved(rank, p, m, v, hop=1):
        steps.append((stage, "I" if kind == "B" else kind, i))
        if kind == "B":
            weights.append((stage, "W", i))
            if len(weights) > rank:
                steps.append(weights.pop(0))
    return steps + weights


def _zbv(rank: int, p: int, m: int, v: int) -> list[Step]:
    """Warm-up, steady and cool-down of 2 p - 1 microbatches or more; of fewer, what is there."""
    row, hops = _Row((rank, 2 * p - 1 - rank)), p - 1 - rank
    row.phase(2 * hops + 1, "F0")
    row.phase(rank, "F1 F0")
    row.phase(hops + 1, "F1 I1 W1")
    row.phase(max(m, 2 * p - 1) - p - hops, "F0 I0 W0 F1 I1 W1")
    row.phase(hops, "I0 W0 F1 I1 W1")
    row.phase(rank, "I0 I1")
    row.phase(hops + 1, "I0 W0")
    row.phase(rank, "W1")
    row.phase(rank, "W0")
    return [step for step in row.steps if step[2] < m]


def _dual_pipe_v(rank: int, p: int, m: int, v: int) -> list[Step]:
    """Steps 1 to 8; a forward and a backward that overlap stand one after the other."""
    row, hops = _Row((rank, 2 * p - 1 - rank)), p - 1 - rank
    row.phase(2 * hops, "F0")
    row.phase(rank + 1, "F0 F1")
    row.phase(hops, "I1 W F1")
    row.phase(m - 2 * p + rank + 1, "F0 B1 F1 B0")
    row.phase(hops, "B1 F1 B0")
    backwards = ["B1", "B0"] * (rank + 1)
    halves = [kind.replace("B", "I") for kind in backwards[rank + 1 :]]
    row.phase(1, " ".join([*backwards[: rank + 1], *halves]))
    row.phase(hops, "W I0")
    row.phase(rank + 1, "W")
    return row.steps


RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _breadth_first,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dual_pipe_v": _dual_pipe_v,
}
