"""The model's full values: brought together one parameter after the other, and taken in.

No rank ever holds more full values than those of one unit, unless the caller keeps them.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.memory.flat_memory import blank
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.memory.secondary_shard import agree_on_serving
from lightning_shard.data_parallel.model_split import ModelSplit, ranks_of
from lightning_shard.data_parallel.units.unit import Unit


@contextmanager
def gathering_near(
    flats: Iterable[FlatParameters], take_back: Callable[[], None]
) -> Iterator[None]:
    """Gather inside from second copies in nodes, if there are any; each rank must call.

    `take_back` writes to the shards what user code has written to memory of theirs.
    """
    pairs = [(flat, flat.secondary) for flat in flats if flat.secondary is not None]
    if pairs:
        take_back()
        for flat, _ in pairs:
            flat.take_in_left()
        ranks = pairs[0][0].groups.shard
        agree_on_serving([(one, flat.shard) for flat, one in pairs], ranks)
    try:
        yield
    finally:
        for _, one in pairs:
            one.serves = False


def bring_together(flats: Iterable[FlatParameters]) -> None:
    """Gather the full parameters of some buffers; each rank must call."""
    for handle in [flat.begin_unshard() for flat in flats]:
        if handle is not None:
            handle.wait()


def publish_loaded(flats: Iterable[FlatParameters]) -> None:
    """Gather full parameters that stay, and were loaded, as they travel; each rank must call."""
    bring_together(flat for flat in flats if flat.is_rounded and not flat.reshards)


class FullValues:
    """Reads and writes the full parameters of a model whose ranks have shards or copies."""

    def __init__(
        self,
        model: nn.Module,
        homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
        units: Sequence[Unit],
        groups: DataGroups,
        split: ModelSplit,
        adopt: Callable[[], None],
    ) -> None:
        self._model, self._homes, self._units = model, homes, units
        self._groups, self._split, self._adopt = groups, split, adopt

    def shape(self, param: nn.Parameter) -> Sequence[int]:
        """Return the full shape of `param`, however it shows itself now."""
        shape = self._split.full_shapes.get(param)
        if shape is not None:
            return shape
        if param not in self._homes:  # user code has added it since
            return param.shape
        flat, index = self._homes[param]
        return flat.layout.slots[index].shape

    @contextmanager
    def loading(self, missing: Container[str]) -> Iterator[None]:
        """Let every parameter be full inside, without values, and take in what they are set to.

        Elements that nobody sets keep their value, and so do the parameters that are named in
        `missing` at the end. Each rank must call.
        """
        self._adopt()
        for unit in self._units:
            for flat in unit.flats:
                flat.present_shards(sharded=False)
        shown = [(param, param.data, param.grad) for param in self._model.parameters()]
        for param, value, _ in shown:
            param.grad = None
            param.data = blank(self.shape(param), value.dtype)
        try:
            yield
            for name, param in self._model.named_parameters():
                if param in self._homes and name not in missing:
                    flat, index = self._homes[param]
                    flat.load(index, self._split.local(param, param.data))
        finally:
            for param, value, grad in shown:
                param.data, param.grad = value, grad
            for unit in self._units:
                for flat in unit.flats if unit.is_resharded else ():
                    flat.present_shards(sharded=True)
        publish_loaded(flat for unit in self._units for flat in unit.flats)

    def each(
        self, *, everywhere: bool = False, without: Container[nn.Parameter] = ()
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Bring the model's parameters together, one after the other; each rank must call.

        Args:
            everywhere: Whether each rank of the first copy gets the full parameters.
            without: Parameters that stay as they are, the same on all ranks.

        Returns:
            Each parameter with its full value in the optimizer's format, on the ranks that are
            the first of their data-parallel group; nothing on the others.
        """
        self._adopt()
        if not self._groups.is_first_copy:
            return
        come: dict[FlatParameters, list[Tensor]] = {}
        for param in self._model.parameters():
            if param in without:
                continue
            value = param.data
            if param in self._homes:
                flat, index = self._homes[param]
                if flat not in come:
                    same = next(unit.flats for unit in self._units if flat in unit.flats)
                    come = {known: values for known, values in come.items() if known in same}
                    come[flat] = flat.full_values()
                value = come[flat][index]
            if everywhere or ranks_of(param, self._groups, self._split).dp.rank == 0:
                value = self._split.full(param, value.detach())
            if everywhere or self._groups.dp.rank == 0:
                yield param, value
            del value  # its unit is let go of before the next one comes
