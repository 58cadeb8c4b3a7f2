"""The table of low precision's options by scheme, as the constructors take or refuse them.

python -m tests.docs.low_precision_table            write it
"""

from typing import Any

from lightning_shard.errors import ConfigError
from tests.docs.api_tables import OF_TRAINER
from tests.docs.pages import ROOT, text_of

PAGE = "docs/low_precision.md"
BEGIN = "<!-- python -m tests.docs.low_precision_table writes this -->\n"
END = "<!-- until here -->\n"
OPTIONS: dict[str, Any] = {
    'quantized_gathers="int8"': {"quantized_gathers": "int8"},
    'gather_dtype="float8"': {"gather_dtype": "float8"},
    'compression="int8"': {"compression": "int8"},
    'compression="int4"': {"compression": "int4"},
}
GIVEN = {"hybrid_parallel": {"zero_stage": 3}}
SCHEMES = [name for name in OF_TRAINER if name not in ("shard_fsdp", "shard_auto")]


def table() -> str:
    """Return the table: a row for each scheme, a column for each option."""
    head = ["scheme", *(f"`{one}`" for one in OPTIONS)]
    rows = [[_shown(name), *(_taken(name, one) for one in OPTIONS.values())] for name in SCHEMES]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(name: str) -> str:
    given = "".join(f", `{key}={value}`" for key, value in GIVEN.get(name, {}).items())
    return f"`{name}`{given}"


def _taken(name: str, options: dict[str, Any]) -> str:
    try:
        OF_TRAINER[name](**options, **GIVEN.get(name, {}))
    except ConfigError as error:
        return "no such option" if "has no option" in str(error) else "refused"
    return "yes"


def with_table(page: str) -> str:
    """Return the text of the page as the constructors are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(with_table(text_of(PAGE)), encoding="utf-8")
