"""What a program may be made of: features with names, and which of them go together.

A feature writes its part into a draft. At most one feature of a slot is in a program; where there
is none, the draft's own default stands, so that leaving a feature out always leaves a program.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

Lines = list[str]
EXACT = "exactly"  # what goes with programs all of whose values are exact in 16 bits

BLOCK = '''
class Block(nn.Module):
    """Two layers beside a skip."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(h)))
'''


@dataclass
class Draft:
    """The parts of a program; what is here when nothing was written is the plainest one."""

    classes: dict[str, str] = field(default_factory=dict)
    init: Lines = field(default_factory=list)
    make_stem: str = "nn.Linear(WIDTH, WIDTH)"
    make_blocks: str = "nn.ModuleList([Block() for _ in range(4)])"
    make_head: str = "nn.Linear(WIDTH, OUT)"
    late_init: Lines = field(default_factory=list)
    stem: Lines = field(default_factory=lambda: ["h = self.stem(x)"])
    before_blocks: Lines = field(default_factory=list)
    blocks: Lines = field(default_factory=lambda: ["for block in self.blocks:", "    h = block(h)"])
    after_blocks: Lines = field(default_factory=list)
    head: Lines = field(default_factory=lambda: ["return self.head(h)"])
    fields: dict[str, str] = field(default_factory=dict)
    sample: str = "({names},)"
    unpack: str = "{names}, = batch"
    collate: str = "from torch.utils.data import default_collate as collate"
    loaders: str = "self.held_out()"
    train_loaders: str = "self.of_training()"
    classes_as_targets: bool = False
    sequence: bool = False
    loss: str = "F.mse_loss(out, y)"
    terms: Lines = field(default_factory=list)
    step: Lines = field(default_factory=lambda: ["return self.loss_of(batch, batch_idx)"])
    methods: dict[str, str] = field(default_factory=dict)
    hooks: dict[str, Lines] = field(default_factory=dict)
    params: str = "list(self.parameters())"
    optimizer: str = "torch.optim.SGD(params, lr=0.05)"
    configured: Lines = field(default_factory=lambda: ["return optimizer"])
    trainer: dict[str, str] = field(default_factory=lambda: {"max_epochs": "1"})
    callbacks: Lines = field(default_factory=list)
    num_samples: int = 32
    num_predicted: int = 16
    dtype: str = "torch.float64"
    width: int = 8
    num_outputs: int = 12
    validates: bool = False
    skips: bool = False
    entries: Lines = field(default_factory=list)
    fit: Lines = field(default_factory=lambda: ["trainer.fit(net, data)"])

    def hook(self, signature: str, *lines: str) -> None:
        """Add lines to a hook of the module, under its signature."""
        self.hooks.setdefault(signature, []).extend(lines)


Write = Callable[[Draft, Random], None]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A part of a program.

    Attributes:
        slot: Of the features of one slot a program has one at most.
        needs: Tags of which each must be given by another feature.
        conflicts: Tags that no other feature may give.
        tags: What it gives: its name, its slot and what it was declared to give.
        order: Those with a smaller number write first.
    """

    name: str
    write: Write
    slot: str
    needs: frozenset[str]
    conflicts: frozenset[str]
    tags: frozenset[str]
    order: int


FEATURES: dict[str, Feature] = {}


def feature(
    name: str,
    *,
    slot: str = "",
    gives: Iterable[str] = (),
    needs: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    order: int = 0,
) -> Callable[[Write], Write]:
    """Return a decorator that makes a feature of a function of a draft and a generator."""

    def declare(write: Write) -> Write:
        assert name not in FEATURES, name
        tags = frozenset({name, *gives} | ({slot} if slot else set()))
        if EXACT not in tags:
            tags |= {"inexact"}
        FEATURES[name] = Feature(
            name=name,
            write=write,
            slot=slot,
            needs=frozenset(needs),
            conflicts=frozenset(conflicts),
            tags=tags,
            order=order,
        )
        return write

    return declare


def tags_of(names: Iterable[str]) -> frozenset[str]:
    """Return all tags that these features give."""
    return frozenset().union(*(FEATURES[name].tags for name in names))


def fits(name: str, others: Sequence[str]) -> bool:
    """Return whether a feature goes with others, whatever it still needs."""
    one = FEATURES[name]
    if name in others:
        return False
    for other in map(FEATURES.__getitem__, others):
        if one.slot and one.slot == other.slot:
            return False
        if one.conflicts & other.tags or other.conflicts & one.tags:
            return False
    return True


def is_whole(names: Sequence[str]) -> bool:
    """Return whether these go together, and each has what it needs."""
    if not all(fits(name, names[:place]) for place, name in enumerate(names)):
        return False
    tags = tags_of(names)
    return all(FEATURES[name].needs <= tags for name in names)


def with_needs(name: str, others: Sequence[str], random: Random) -> list[str] | None:
    """Return the others, the feature and what it needs beside them; None if that cannot be."""
    if not fits(name, others):
        return None
    found = [*others, name]
    while missing := sorted(
        frozenset().union(*(FEATURES[one].needs for one in found)) - tags_of(found)
    ):
        givers = [
            one for one, its in FEATURES.items() if missing[0] in its.tags and fits(one, found)
        ]
        if not givers:
            return None
        found.append(random.choice(givers))
    return found


def drawn(seed: int) -> list[str]:
    """Return the features of the program with this seed, sorted."""
    random = Random(f"features of {seed}")
    size, found = random.randint(3, 12), list[str]()
    for name in random.sample(sorted(FEATURES), len(FEATURES)):
        if len(found) >= size:
            break
        found = with_needs(name, found, random) or found
    return sorted(found)


def possible_pairs() -> set[tuple[str, str]]:
    """Return the pairs of features that can be in one program."""
    random = Random(0)
    return {
        (a, b)
        for a, b in itertools.combinations(sorted(FEATURES), 2)
        if (alone := with_needs(a, [], random)) is not None
        and (b in alone or any(with_needs(b, one, random) for one in ([a], alone)))
    }


def pairs_of(names: Sequence[str]) -> set[tuple[str, str]]:
    """Return the pairs of features of one program."""
    return set(itertools.combinations(sorted(names), 2))
