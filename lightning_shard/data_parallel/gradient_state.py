"""The state of one parameter's gradient: where it lies, and which ranks used the parameter.

    NONE ──arrive──> LOCAL ──leave──> NONE ──come──> REDUCED ──arrive──> BOTH ──leave──> REDUCED
                       any state ──forget──> NONE

A gradient leaves the full buffer when its reduction begins, and comes to lie in the shard of
gradients when the reduction has ended; what backward makes meanwhile arrives for the next one.
"""

from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """The places in which a gradient may lie."""

    NONE = "nowhere: there is none"
    LOCAL = "in the full buffer: this rank's own, not yet reduced"
    REDUCED = "in the shard: an average since the last zero_grad"
    BOTH = "an average in the shard, and in the full buffer what is to be added to it"


@dataclass(slots=True)
class GradientState:
    """The state of one parameter's gradient.

    Attributes:
        place: Where the gradient lies.
        is_used: Whether this rank has used the parameter since the last zero_grad.
        is_valid: Whether any rank has used it, so that the optimizer sees a gradient.
    """

    place: Place = Place.NONE
    is_used: bool = False
    is_valid: bool = False

    @property
    def is_local(self) -> bool:
        """Whether some of the gradient is still to be reduced."""
        return self.place is Place.LOCAL or self.place is Place.BOTH

    @property
    def is_reduced(self) -> bool:
        """Whether some of the gradient has been reduced."""
        return self.place is Place.REDUCED or self.place is Place.BOTH

    def arrive(self) -> None:
        """Note that this rank has a new gradient."""
        self.place = Place.BOTH if self.is_reduced else Place.LOCAL
        self.is_used = True

    def leave(self) -> None:
        """Note that nothing lies in the full buffer any more: it was sent, or zeroed."""
        self.place = Place.REDUCED if self.is_reduced else Place.NONE

    def come(self) -> None:
        """Note that an average lies in the shard."""
        self.place = Place.BOTH if self.is_local else Place.REDUCED

    def show(self) -> None:
        """Note that an average lies in the shard, for every rank's optimizer to see."""
        self.come()
        self.is_valid = True

    def forget(self) -> None:
        """Note that the gradient is gone."""
        self.place, self.is_used, self.is_valid = Place.NONE, False, False
