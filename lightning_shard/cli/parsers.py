"""The arguments of the subcommands for checkpoints, parsed without torch."""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter

TEXTS = {
    "consolidate": "Write a checkpoint as a .ckpt, .pt or .safetensors, or for Hugging Face.",
    "describe": "Say what is in a checkpoint.",
}
"""By subcommand what it does."""

_EXAMPLES = {
    "consolidate": """\
    lightning-shard consolidate last.ckpt/ whole.ckpt            with optimizers, to resume anywhere
    lightning-shard consolidate last.ckpt/ model.safetensors --dtype bfloat16
    lightning-shard consolidate last.ckpt/ model/ --max-shard-size 2GB    Hugging Face layout

SRC is a folder of the sharded format, of Lightning's ModelParallelStrategy or FSDPStrategy, or of
torch.distributed.checkpoint; a .ckpt, a .pt, or safetensors. Paths of fsspec (s3://...) work too.
""",
    "describe": """\
    lightning-shard describe last.ckpt
    lightning-shard describe last.ckpt --verify
    lightning-shard describe last.ckpt --json | jq .global_step

The exit code is 1 if something is missing or damaged.
""",
}
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}


def parser_of(subcommand: str) -> ArgumentParser:
    """Return the parser of "consolidate" or "describe"."""
    parser = ArgumentParser(
        prog=f"lightning-shard {subcommand}",
        description=TEXTS[subcommand],
        epilog=_EXAMPLES[subcommand],
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = _add_consolidate if subcommand == "consolidate" else _add_describe
    add(parser)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    return parser


def _add_consolidate(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="The checkpoint, a folder or a file.")
    parser.add_argument("output", metavar="OUT", help="Where to; the suffix says as what.")
    parser.add_argument(
        "--format",
        choices=["ckpt", "pt", "safetensors", "huggingface"],
        help="What OUT is, whatever its suffix.",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="Write a .ckpt without optimizers, schedulers and callbacks.",
    )
    parser.add_argument(
        "--dtype", choices=list(_DTYPES), help="Turn floating-point weights into this format."
    )
    parser.add_argument(
        "--prefix", default="", help="Write only weights whose names begin so, without it."
    )
    parser.add_argument(
        "--max-shard-size",
        type=num_bytes,
        default="5GB",
        metavar="SIZE",
        help="Longest file of the Hugging Face layout (default: %(default)s).",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="Load objects, too (hyperparameters, callbacks): loading them runs code.",
    )


def _add_describe(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="The checkpoint, a folder or a file.")
    parser.add_argument("--verify", action="store_true", help="Compare it with its checksums.")
    parser.add_argument("--json", action="store_true", help="Print JSON, for scripts.")
    parser.add_argument(
        "--depth", type=int, default=3, help="Levels of modules (default: %(default)s)."
    )


def dtype_name(given: str) -> str:
    """Return torch's name of a format."""
    return _DTYPES[given]


def num_bytes(text: str) -> int:
    """Return the bytes in a text such as "5GB" or "500 MiB"."""
    upper = text.strip().upper()
    for unit, size in _UNITS.items():
        number = upper.removesuffix(unit).strip()
        if number != upper and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * size)
    raise ArgumentTypeError(f"{text!r} is no size, expected 5GB or 500MiB")
