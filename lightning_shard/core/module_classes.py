"""Classes of modules that a run extends by mixins, and gives back in any order.

Several dimensions may extend the class of one module: a pipeline a block, experts the same block,
which is a mixture.

    Block  ->  (_Caught, Block)  ->  (_Mixing, (_Caught, Block))
                                     without _Caught: (_Mixing, Block)
"""

from collections.abc import Iterable

from torch import nn

_OF_EVERY_CLASS = ("__dict__", "__weakref__")


def give_class_back(module: nn.Module, mixins: Iterable[type]) -> None:
    """Take the first of some mixins off a module's class.

    A class that user code has made of it since, as a parametrization does, stays, and so does one
    with another mixin.
    """
    firsts = {(mixin,) for mixin in mixins}
    seen = type(module)
    made = next(one for one in seen.__mro__ if one.__bases__[:1] in firsts)
    own = made.__bases__[1]
    if seen is made:
        module.__class__ = own
    elif seen.__bases__ == (made,):  # a parametrization's, which is this module's alone
        seen.__bases__ = (own,)
    else:
        module.__class__ = _without(seen, made)


def _without(kind: type, made: type) -> type:
    """Return a class like `kind`, which has another base where it has `made`."""
    if kind is made:
        return made.__bases__[1]
    bases = tuple(_without(one, made) if issubclass(one, made) else one for one in kind.__bases__)
    return type(
        kind.__name__,
        bases,
        {name: one for name, one in vars(kind).items() if name not in _OF_EVERY_CLASS},
    )
