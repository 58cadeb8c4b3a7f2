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
from io import BytesIO
from typing import Any

import torch

_MARK, _PICKLED = "~", "~torch.save:"


def with_texts(value: Any) -> Any:
    """Return nested mappings and lists with texts in the place of keys."""
    if isinstance(value, list):
        return [with_texts(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {_text(key): with_texts(one) for key, one in value.items()}


def _text(key: Any) -> str:
    if type(key) is str and not key.startswith(_MARK):
        return key
    if _is_literal(key):
        return f"{_MARK}{key!r}"
    file = BytesIO()
    torch.save(key, file)
    return f"{_PICKLED}{b64encode(file.getbuffer()).decode()}"


def _is_literal(key: Any) -> bool:
    if isinstance(key, tuple):
        return type(key) is tuple and all(map(_is_literal, key))
    is_finite = not isinstance(key, float) or abs(key) < float("inf")
    return type(key) in (str, bytes, int, bool, float, type(None)) and is_finite


def key_of(text: str, unpickled: Callable[[bytes], Any]) -> Any:
    """Return the key that a text stands for; an object is made by `unpickled`."""
    if text.startswith(_PICKLED):
        return unpickled(b64decode(text.removeprefix(_PICKLED)))
    try:
        return literal_eval(text.removeprefix(_MARK)) if text.startswith(_MARK) else text
    except (ValueError, SyntaxError):  # a text of somebody else's
        return text
