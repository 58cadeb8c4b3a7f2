"""Random numbers under tensor parallel: common to the ranks outside of regions, own within.

    common stream   ──● draw ●─────────────── restored ──●──►     the same on each rank
                      │                          ▲
    within a region   └─► seed * W + rank ──► dropout of this rank's heads or features

A region's stream starts from a number of the common one and ends with the region, so that nothing
beside torch's own state has to be kept: a checkpoint of the activations that restores that state
draws the same again, and so does a resumed run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.tensor_parallel.layers import Crossing
from lightning_shard.tensor_parallel.plan import PlannedLayer

_NO_STATE = torch.empty(0)
_NUM_SEEDS = 2**32  # torch's generator of the CPU looks at 32 bits of a seed


class RegionRandomness:
    """Gives each rank random numbers of its own from a region's first layer to its last."""

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self._seed = 0
        self._begun = self._common = self._undrawn = _NO_STATE

    def entering(self, module: nn.Module, enter: Crossing, tensor: Tensor) -> Tensor:
        """Begin the region's stream where `module` is training, then `enter`."""
        self._begin(module, tensor.device)
        return enter(tensor)

    def leaving(self, leave: Crossing, tensor: Tensor) -> Tensor:
        """Go back to the common stream, then `leave`."""
        self._end(tensor.device)
        return leave(tensor)

    @contextmanager
    def outside(self, tensor: Tensor) -> Iterator[None]:
        """Draw from the common stream inside, also where a region's stream is on."""
        generator = _generator(tensor.device)
        if not self._is_within(generator):
            yield
            return
        own = generator.get_state()
        generator.set_state(self._common)
        try:
            yield
        finally:
            after = generator.get_state()
            if not torch.equal(after, self._common):
                self._common = after
                if tensor.device.type == "cpu":
                    self._undrawn = after
            generator.set_state(own)

    def starting(self, module: nn.Module, leave: Crossing, tensor: Tensor) -> Tensor:
        """Begin the region's stream after `leave`, where `module` is training."""
        result = leave(tensor)
        self._begin(module, result.device)
        return result

    def _begin(self, module: nn.Module, device: torch.device) -> None:
        generator = _generator(device)
        # Within it is the second of several layers that enter together.
        if not module.training or self._is_within(generator):
            return
        self._undrawn = torch.get_rng_state()
        self._seed = _own_seed(self._group)
        self._common = generator.get_state()
        self._begun = generator.manual_seed(self._seed).get_state()

    def _end(self, device: torch.device) -> None:
        generator = _generator(device)
        if self._is_within(generator):
            is_unused = torch.equal(generator.get_state(), self._begun)
            generator.set_state(self._common)
            if is_unused:
                torch.set_rng_state(self._undrawn)
        self._begun = self._common = self._undrawn = _NO_STATE

    def _is_within(self, generator: torch.Generator) -> bool:
        """Whether the region's stream is on; a recomputation may have ended early, within it."""
        return self._begun is not _NO_STATE and generator.initial_seed() == self._seed


@contextmanager
def drawn_apart(group: Collectives, device: torch.device) -> Iterator[None]:
    """Give each rank random numbers of its own for a while; the common stream goes on after it."""
    generator = _generator(device)
    seed = _own_seed(group)
    common = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(common)


def layers_around_dropout(model: nn.Module, layers: Sequence[PlannedLayer]) -> Iterator[nn.Module]:
    """Yield the layers that begin a region in which something may be dropped.

    They hand out features, or mix heads themselves, and something in their parent drops out.
    """
    for layer in layers:
        style = layer.style
        begins = style.form in ("attention", "experts", "shared") or (
            style.form in ("colwise", "unsplit", "unsplit_shared") and not style.full_output
        )
        if begins and _drops(model.get_submodule(layer.parent)):
            yield layer.module


def _own_seed(group: Collectives) -> int:
    """Draw a seed from the common stream, on the CPU, so that no rank waits for a device."""
    drawn = int(torch.randint(_NUM_SEEDS // group.size, ()))
    return drawn * group.size + group.rank


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def _drops(parent: nn.Module) -> bool:
    """Whether a module or one within it has a rate above zero: a `Dropout.p`, `dropout_rate`."""
    return any(
        isinstance(value, float)
        and value > 0
        and "drop" in f"{type(module).__name__}.{name}".lower()
        for module in parent.modules()
        for name, value in vars(module).items()
    )
