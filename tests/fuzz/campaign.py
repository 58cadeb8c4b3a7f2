"""Many programs under schemes, and what is said of them in the end."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.features import drawn, pairs_of, possible_pairs
from tests.fuzz.program import program
from tests.fuzz.run import DEFECT, EQUAL, LEFT_OUT, REFUSED, UNFIT, Outcome
from tests.fuzz.schemes import SCHEMES
from tests.fuzz.shrink import shrunk
from tests.fuzz.workers import Task, Worker, outcomes

FOLDER = Path("build/fuzz")


@dataclass
class Campaign:
    """What came of programs, counted."""

    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    programs: set[int] = field(default_factory=set)
    unfit: dict[int, str] = field(default_factory=dict)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    defects: list[tuple[Task, Outcome]] = field(default_factory=list)
    since_a_defect: set[int] = field(default_factory=set)

    def add(self, task: Task, outcome: Outcome) -> None:
        """Count one run."""
        self.programs.add(task.seed)
        if outcome.verdict == UNFIT:
            self.unfit[task.seed] = outcome.kind
            return
        self.since_a_defect.add(task.seed)
        self.verdicts[task.scheme][outcome.verdict] += 1
        if outcome.verdict != LEFT_OUT:
            self.pairs |= pairs_of(task.features)
        if outcome.verdict == REFUSED:
            self.refusals[_without_numbers(outcome.text)] += 1
        if outcome.verdict == DEFECT:
            self.defects.append((task, outcome))
            self.since_a_defect.clear()


def schemes_for(features: Sequence[str], seed: int, count: int) -> list[str]:
    """Return the schemes that a program runs under, of those that promise it; all for 0."""
    fit = [one for one in SCHEMES.values() if one.promises(features)]
    random = Random(f"schemes of {seed}")
    # The largest of these are a draw without replacement by shares.
    fit.sort(key=lambda one: -(random.random() ** (1 / one.share_for(features))))
    if count == 0:
        fit = [one for one in fit if one.backend is None]
    return [one.name for one in fit[: count or None]]


def tasks(
    seeds: Sequence[int], runs_per_program: int, only: Collection[str] = ()
) -> Iterator[Task]:
    """Yield the runs of programs with these seeds; `only` some schemes, if any are named."""
    for seed in seeds:
        features = tuple(drawn(seed))
        for name in only or schemes_for(features, seed, runs_per_program):
            yield Task(features, seed, name)


def run_all(
    pool: Sequence[Worker], all_tasks: Iterable[Task], journal: Path | None = None
) -> Campaign:
    """Run programs; print each defect as it comes. Ctrl-C leaves what has come by then.

    Each run is added to the journal as it is done, if there is one.
    """
    campaign = Campaign()
    with suppress(KeyboardInterrupt):
        for task, outcome in outcomes(pool, all_tasks):
            campaign.add(task, outcome)
            if journal is not None:
                with journal.open("a") as file:
                    file.write(json.dumps({"task": asdict(task), "outcome": asdict(outcome)}))
                    file.write("\n")
            if outcome.verdict == DEFECT:
                print(f"seed {task.seed} under {task.scheme}: {outcome.kind}", flush=True)
    return campaign


def read(journals: Iterable[Path]) -> Campaign:
    """Return what came of the programs of several campaigns together."""
    campaign = Campaign()
    for journal in journals:
        for entry in map(json.loads, journal.read_text().splitlines()):
            task = entry["task"] | {"features": tuple(entry["task"]["features"])}
            campaign.add(Task(**task), Outcome(**entry["outcome"]))
    return campaign


def shrink_all(
    pool: Sequence[Worker], campaign: Campaign, per_kind: int = 3
) -> dict[tuple[str, tuple[str, ...]], list[tuple[Task, Outcome]]]:
    """Shrink the first defects of each kind and scheme; return them by kind and features.

    Defects of a kind whose features hold those of a smaller one are taken for the same.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[Task, Outcome]]] = {}
    tried: Counter[tuple[str, str]] = Counter()
    for task, outcome in sorted(campaign.defects, key=lambda one: len(one[0].features)):
        family = re.sub(r"[ x,].*", "", task.scheme)
        known = [
            key
            for key in groups
            if key[0] == outcome.kind and set(key[1]) <= set(task.features) and key[1]
        ]
        if known:
            groups[known[0]].append((task, outcome))
            continue
        tried[family, outcome.kind] += 1
        if tried[family, outcome.kind] > per_kind:
            groups.setdefault((outcome.kind, ()), []).append((task, outcome))
            continue

        def judge(features: tuple[str, ...], task: Task = task) -> Outcome:
            return next(outcomes(pool[:1], [Task(features, task.seed, task.scheme)]))[1]

        fewest, its_outcome = shrunk(task.features, outcome, judge)
        small = Task(fewest, task.seed, task.scheme)
        groups.setdefault((its_outcome.kind, fewest), []).append((small, its_outcome))
    return groups


def written(folder: Path, number: int, task: Task, outcome: Outcome) -> Path:
    """Write the script of a defect; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    scheme = SCHEMES[task.scheme]
    source = program(task.features, task.seed, scheme.source, scheme.num_ranks)
    path = folder / f"defect_{number}.py"
    said = "".join(f"# {line}\n" for line in outcome.text.splitlines()[-25:])
    path.write_text(f"{source}\n# Under {scheme.name}: {outcome.kind}\n{said}")
    return path


def report(campaign: Campaign) -> str:
    """Return figures of programs and runs, verdicts by scheme, and pairs of features covered."""
    possible = possible_pairs()
    total = sum(campaign.verdicts.values(), Counter[str]())
    names = (EQUAL, REFUSED, DEFECT)
    lines = [f"{'scheme':32}" + "".join(f"{name:>10}" for name in names)]
    for scheme, counts in sorted(campaign.verdicts.items()):
        lines.append(f"{scheme:32}" + "".join(f"{counts[name]:>10}" for name in names))
    lines += [
        f"{'all':32}" + "".join(f"{total[name]:>10}" for name in names),
        "",
        f"{len(campaign.programs)} programs, {sum(total[name] for name in names)} runs; "
        f"{len(campaign.unfit)} programs unfit on one device; "
        f"{len(campaign.pairs & possible)} of {len(possible)} possible pairs of features; "
        f"the last {len(campaign.since_a_defect)} programs without a defect",
    ]
    lines += [f"unfit: seed {seed}: {why}" for seed, why in sorted(campaign.unfit.items())[:20]]
    lines += [f"refused {count}x: {text}" for text, count in campaign.refusals.most_common(60)]
    return "\n".join(lines)


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "N", " ".join(text.split()))[:110]
