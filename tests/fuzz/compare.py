"""Where what two runs have left is first apart."""

from collections.abc import Mapping

from torch import Tensor

TOLERANCE = 1e-8  # of programs in double precision, after a few steps
EXACT_TOLERANCE = 2e-6  # of programs in float32 whose values are exact
LARGEST = 1e6  # a program whose values grow beyond says nothing


def says_something(found: Mapping[str, Tensor]) -> bool:
    """Return whether all values are finite and not so large that rounding shows."""
    return all(
        bool(value.isfinite().all()) and float(value.abs().amax()) < LARGEST
        for value in found.values()
        if value.numel()
    )


def first_difference(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float
) -> str | None:
    """Return the name of the first value that is apart, and by how much; None if none is."""
    for name in one:
        if name not in other:
            return f"{name}: missing on ranks"
        said = _apart(one[name], other[name], tolerance)
        if said is not None:
            return f"{name}: {said}"
    more = [name for name in other if name not in one]
    return f"{more[0]}: on ranks only" if more else None


def _apart(one: Tensor, other: Tensor, tolerance: float) -> str | None:
    if one.shape != other.shape:
        return f"of shape {tuple(other.shape)} for {tuple(one.shape)}"
    if not one.numel():
        return None
    apart = float((one - other).abs().amax())
    most = float(one.abs().amax())
    if apart <= tolerance * (1 + most):  # not where one is NaN
        return None
    if one.numel() == 1:
        return f"{float(other):.8g} for {float(one):.8g}"
    return f"apart by {apart:.2e}, at most {most:.2e}"


def kind_of(difference: str) -> str:
    """Return the name of a difference without numbers, to group by."""
    name = difference.split(":", maxsplit=1)[0]
    first = name.split(" ", maxsplit=1)[0]
    if first == "note":
        name = difference.split(": ", maxsplit=2)[1]
        words = name.replace(",", "").split(" ")
        return "values of a note: " + ("spread over ranks" if "spread" in words else words[0])
    return f"values: {first}"


def tolerance_of(features: set[str] | frozenset[str]) -> float:
    """Return how far values of a program with these tags may be apart."""
    return EXACT_TOLERANCE if "exact" in features else TOLERANCE
