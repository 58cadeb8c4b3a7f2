"""Texts for keys of any kind, since a folder's index has texts alone, and back.

    "momentum"     momentum
    (1, "a"), 7    ~(1, 'a')   ~7                 what Python reads as it writes it
    Color.RED      ~torch.save:UEsDBAAACAg...     any other object
    "~7"           ~'~7'

torch writes `str(key)`: what came back was another key, which an optimizer did not find.
"""

from ast import literal_eval
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import torch

_MARK, _PICKLED = "~", "~torch.save:"


def with_keys(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested mappings and lists with their keys changed."""
    if isinstance(value, list):
        return [with_keys(one, change) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {change(key): with_keys(one, change) for key, one in value.items()}


def text_of(key: Any) -> str:
    """Return the text that stands for a key, the same on all ranks."""
    if type(key) is str and not key.startswith(_MARK):
        return key
    with suppress(ValueError, SyntaxError):  # Python does not read what it writes of an object
        if repr(literal_eval(repr(key))) == repr(key):
            return f"{_MARK}{key!r}"
    file = BytesIO()
    torch.save(key, file)
    return f"{_PICKLED}{b64encode(file.getbuffer()).decode()}"


def key_of(text: str, unpickled: Callable[[bytes], Any]) -> Any:
    """Return the key that a text stands for; an object is made by `unpickled`."""
    if text.startswith(_PICKLED):
        return unpickled(b64decode(text.removeprefix(_PICKLED)))
    with suppress(ValueError, SyntaxError):  # a text of somebody else's
        return literal_eval(text.removeprefix(_MARK)) if text.startswith(_MARK) else text
    return text
