"""One rank's random streams, of torch's generators, numpy and Python, as tensors and numbers."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_shard.backends.collectives import Collectives

_OF_NUMPY = "MT19937"
_NUMPY_WORDS = 624


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the CPU's streams and the device's, to be read without running code."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": _of_python(random.getstate()),
    }
    of_numpy = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] == _OF_NUMPY:  # another was put in by user code
        state["numpy"] = {
            "keys": torch.from_numpy(of_numpy["state"]["key"].view(np.int32).copy()),
            "position": int(of_numpy["state"]["pos"]),
            "has_normal": int(of_numpy["has_gauss"]),
            "normal": float(of_numpy["gauss"]),
        }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def load_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the streams to what `random_state` has returned on this rank."""
    torch.set_rng_state(state["torch"])
    random.setstate(_for_python(state["python"]))
    if "numpy" in state and np.random.get_state(legacy=False)["bit_generator"] == _OF_NUMPY:
        saved = state["numpy"]
        keys = saved["keys"].numpy().view(np.uint32)
        normal = saved["has_normal"], saved["normal"]
        np.random.set_state((_OF_NUMPY, keys, saved["position"], *normal))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def share_random_state(group: Collectives, device: torch.device) -> None:
    """Give each rank the random state of rank 0; each must call."""
    load_random_state(group.broadcast_object(random_state(device)), device)


def generator_state(one: Any) -> Any:
    """Return the state of a generator of torch's, Python's or numpy's; None of anything else."""
    if isinstance(one, torch.Generator):
        return one.get_state()
    if type(one) is random.Random:
        return _of_python(one.getstate())
    if isinstance(one, np.random.Generator):
        return json.dumps(one.bit_generator.state, default=np.ndarray.tolist)
    return None


def load_generator_state(one: Any, state: Any) -> None:
    """Set a generator to what `generator_state` has returned of its like."""
    if isinstance(one, torch.Generator):
        one.set_state(state)
    elif isinstance(one, random.Random):
        one.setstate(_for_python(state))
    else:
        one.bit_generator.state = json.loads(state)


def _of_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, normal = state
    packed = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    return {"version": version, "words": packed, "normal": normal}


def _for_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    words = state["words"].numpy().view(np.uint32)
    return state["version"], tuple(words.tolist()), state["normal"]


def random_misfit(state: Any) -> str | None:
    """Return what of a saved state cannot be loaded here; None where all can."""
    try:
        found = [state["torch"], state["python"]["words"]]
        found += [state["numpy"]["keys"]] if "numpy" in state else []
        sizes = [(one.numel(), one.dtype) for one in found]
    except (AttributeError, KeyError, TypeError) as error:
        return f"got {type(error).__name__}: {error}, expected those of torch, Python and numpy"
    expected = [
        (torch.get_rng_state().numel(), torch.uint8),
        (len(random.getstate()[1]), torch.int32),
        (_NUMPY_WORDS, torch.int32),
    ][: len(sizes)]
    return None if sizes == expected else f"got {sizes}, expected {expected}"
