"""What the value of an argument must be: a type for each, which refuses it before any work.

A parser calls the type that stands beside an argument. What it raises is one line and exit code 2,
as every refusal of a parser is.
"""

import os
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from typing_extensions import override

from lightning_shard.core.extras import missing

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}
_PICTURES = (".png", ".svg", ".pdf", ".jpg")


class OneLineParser(ArgumentParser):
    """Refuses arguments in one line, without its usage."""

    @override
    def error(self, message: str) -> NoReturn:
        command = self.prog.replace(" [options]", "")
        self.exit(2, f"{command}: {message} (see {command} --help)\n")


def at_least_one(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def num_bytes(text: str) -> int:
    """Return the bytes in a text such as "5GB" or "500 MiB"."""
    upper = text.strip().upper()
    for unit, size in _UNITS.items():
        number = upper.removesuffix(unit).strip()
        if number != upper and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * size)
    raise ArgumentTypeError(f"{text!r} is no size, expected 5GB or 500MiB")


def mapping_in(path: str) -> dict[str, Any]:
    """Return what a YAML file holds."""
    import yaml

    try:
        held = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentTypeError(f"{path!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise ArgumentTypeError(f"{path!r} is no YAML: {told}") from error
    if not isinstance(held, dict):
        raise ArgumentTypeError(f"{path!r} holds {type(held).__name__}, expected a mapping")
    return held


def configuration(path: str) -> str:
    """Return the path of a configuration of `fit`, or one that is written out as JSON."""
    held = {} if path.startswith("{") else mapping_in(path)
    trainer = held.get("trainer")
    if isinstance(trainer, (int, float, list)):
        raise ArgumentTypeError(f"{path!r} has trainer: {trainer}, expected a mapping of options")
    return path


def new_file(path: str) -> str:
    """Return the path of a file that can be written, in a folder that is made if it is missing."""
    place = Path(path).absolute()
    if place.is_dir():
        raise ArgumentTypeError(f"{path!r} is a folder, expected the path of a file")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ArgumentTypeError(f"{path!r} cannot be written: {why}") from error
    if place.exists() and not os.access(place, os.W_OK):
        raise ArgumentTypeError(f"{path!r} cannot be written: it is read-only")
    return path


def new_picture(path: str) -> str:
    """Return the path of a picture that can be drawn."""
    if Path(path).suffix.lower() not in _PICTURES:
        raise ArgumentTypeError(f"{path!r} has none of the endings {', '.join(_PICTURES)}")
    if lack := missing("matplotlib"):
        raise ArgumentTypeError(lack)
    return new_file(path)


def check_configurations(prog: str) -> None:
    """Refuse configurations in `sys.argv` that Lightning's parser would not read."""
    parser = OneLineParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", type=configuration, action="append")
    parser.parse_known_args()
