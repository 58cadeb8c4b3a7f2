"""The page: every section, well-formed drawings, nothing from anywhere else, text that is text."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.core.reporting.page import SECTIONS, Report, page_of, write_report
from lightning_shard.core.reporting.records import RunRecords, read_run
from tests.core.reporting.runs import fit, flops, memory, step, whole_run, write, write_timeline

_EMPTY = {"meta", "link", "br"}  # elements without an end


class Page(HTMLParser):
    """Reads a page: its elements in order, and whether they are closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def section(text: str, name: str) -> str:
    (found,) = re.findall(rf'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    return str(found)


def page(folder: Path, records: list[dict[str, Any]]) -> str:
    return page_of(read_run(write(folder, records)))


@pytest.fixture
def full(tmp_path: Path) -> str:
    write(tmp_path, whole_run())
    write_timeline(tmp_path)
    row = {"memory": {"parameters": 4096, "activations": 70000}}
    (tmp_path / "plan.json").write_text(f'{{"recommendation": {row}}}'.replace("'", '"'))
    return page_of(read_run(tmp_path))


def test_every_section_is_there_once_with_its_figures(full: str) -> None:
    read = Page(full)
    assert read.open == []
    ids = [given["id"] for tag, given in read.elements if tag == "section"]
    assert ids == [name for name in SECTIONS if name != "optimizer"]
    assert "hybrid_parallel on 4 ranks" in read.text
    assert "Finished." in read.text
    assert "Rank 2 has 1.15 times" in section(full, "ranks")
    assert "512" in section(full, "throughput")
    assert "12.8%" in section(full, "throughput")
    assert "plan, fullest" in section(full, "memory")
    assert "8.00 KiB (+0.0%)" in section(full, "memory")
    assert "+11.1%" in section(full, "traffic")
    assert "batch_000050.json" in section(full, "pipeline")
    assert "a fit begins on 4 ranks" in section(full, "events")


def test_drawings_are_well_formed_and_inside_their_frames(full: str) -> None:
    found = drawings(full)
    assert len(found) == 6  # loss, steps, ranks, throughput, memory, pipeline
    for one in found:
        assert one.get("aria-label")
        _, _, width, height = map(float, str(one.get("viewBox")).split())
        for rect in one.iter("rect"):
            x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width + 0.5
            assert 0 <= y <= y + high <= height + 0.5
        for line in one.iter("polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_bars_are_as_long_as_what_they_show(full: str) -> None:
    one = next(one for one in drawings(full) if one.get("aria-label") == "Median step of each rank")
    widths: dict[str, float] = {}
    for rect in one.iter("rect"):
        title = str(rect.findtext("title"))
        if "compute" in title:
            widths[title] = float(rect.attrib["width"])
    slow, quick = widths["rank 2: compute 3 s"], widths["rank 0: compute 2 s"]
    assert slow / quick == pytest.approx(1.5, rel=1e-3)


def test_nothing_comes_from_anywhere_else(full: str) -> None:
    assert not re.search(r"https?:|//|url\(|@import|<script", full)
    for tag, given in Page(full).elements:
        assert tag not in ("script", "img", "iframe", "object", "embed"), tag
        assert not (given.keys() & {"src", "srcset", "onload", "onclick"})
        assert given.get("href", "data:,") == "data:,"
    assert "default-src 'none'" in full


def test_both_schemes_define_every_colour_that_is_used(full: str) -> None:
    light, dark = full.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--\w+)\)", full))
    assert len(used) >= 14
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark.split("</style>")[0].split("* {")[0]
    classes = {
        name
        for one in drawings(full)
        for element in one.iter()
        for name in element.get("class", "").split()
        if re.fullmatch(r"s\d", name)
    }
    assert all(f"rect.{name} " in full for name in classes)


@pytest.mark.parametrize(
    "kind", ["step", "memory", "traffic", "flops", "dry_run", "metrics", "end"]
)
def test_a_run_without_one_kind_of_record_has_the_other_sections(kind: str, tmp_path: Path) -> None:
    text = page(tmp_path, [one for one in whole_run() if one["kind"] != kind])
    read = Page(text)
    ids = [given["id"] for tag, given in read.elements if tag == "section"]
    assert ("memory" in ids) is (kind != "memory")
    assert ({"steps", "ranks"} <= {*ids}) is (kind != "step")
    drawings(text)


def test_sections_without_figures_are_left_out_and_named(tmp_path: Path) -> None:
    """Empty sections stood between the others, each with a sentence."""
    text = page(tmp_path, [fit(0)])
    assert re.findall(r'<section id="(\w+)"', text) == ["events"]
    read = Page(text).text
    assert "No end was written" in read
    assert "No callback of this run has written of: Loss, Learning rate and gradient, " in read


def test_the_verdict_is_said_first(full: str, tmp_path: Path) -> None:
    (said,) = re.findall(r'<p class="verdict">(.*?)</p>', full)
    assert said.startswith(
        "62% compute; 16% waiting; the others wait for ranks 2 and 3; memory within "
    )
    assert said.endswith("; loss falls from 5.25 to 1.25.")
    assert full.index(said) < full.index("<section")
    assert "verdict" not in page(tmp_path / "begun", [fit(0)]).split("<body>")[1]


def test_the_verdict_says_from_which_step_on_the_loss_is_no_number(tmp_path: Path) -> None:
    """NaN is written as null, and a loss that was NaN in the end was said to fall."""
    losses = (3.0, 2.0, None, None)
    records = [fit(0), *(step(0, n, loss=one) for n, one in enumerate(losses, 1))]
    assert "; loss is no number from step 3 on." in page(tmp_path, records)


def test_learning_rate_and_gradient_norm_are_drawn(tmp_path: Path) -> None:
    records = [fit(0), *(step(0, n, learning_rate=0.1 / n, grad_norm=2.0) for n in (1, 2, 3))]
    told = section(page(tmp_path, records), "optimizer")
    assert "Learning rate, step 2: 0.05" in told
    assert "Gradient norm, step 3: 2" in told


def test_axes_have_titles_and_points_are_seen(full: str) -> None:
    """Points were transparent but under the pointer, and axes had no names."""
    (loss,) = drawings(section(full, "loss"))
    assert [one.text for one in loss.iter("text") if "axis" in one.get("class", "")] == [
        "Loss",
        "step",
    ]
    assert "circle.s0 { fill: var(--s0); }" in full
    assert "transparent" not in full


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    folders = [write(tmp_path / name / "1", whole_run()) for name in "ab"]
    text = write_report(folders[0], others=folders[1:]).read_text()
    assert len(re.findall('<p class="verdict">', text)) == 2
    for folder in folders:
        assert f"training, {folder}" in section(text, "loss")
        assert f"tokens a second, {folder}" in section(text, "throughput")


def test_a_notebook_shows_the_page_in_a_frame(tmp_path: Path) -> None:
    shown = Report(write(tmp_path, whole_run()))._repr_html_()
    frame = Page(shown)
    (given,) = [given for tag, given in frame.elements if tag == "iframe"]
    assert given["srcdoc"] == page_of(read_run(tmp_path))


def test_a_run_of_one_step_and_equal_losses_can_be_drawn(tmp_path: Path) -> None:
    records = [fit(0, world_size=1), step(0, 1, loss=0.0), memory(0, 1), flops(None)]
    records[1] |= {"waiting": {}, "seconds": 0.0, "compute": 0.0, "optimizer": 0.0}
    records[1] |= {"loading": 0.0, "sending": 0.0}
    assert drawings(page(tmp_path, records))


def test_a_long_run_is_a_page_of_some_hundred_kilobytes(tmp_path: Path) -> None:
    records = [fit(0, world_size=1)]
    records += [step(0, number, data_size=1) for number in range(1, 5001)]
    text = page(tmp_path, records)
    assert len(text) < 400_000
    assert "4,951 to" not in text
    assert re.search(r"step 4\d\d\d to 5000: compute", text)


def test_text_of_the_run_is_no_markup(tmp_path: Path) -> None:
    failure = {"kind": "failure", "rank": 1, "step": 3, "error": "<script>alert(1)</script> & more"}
    records = [fit(0, strategy="<b>mine</b>"), fit(1), failure]
    text = page(tmp_path, records)
    assert "<script" not in text
    assert "<b>mine" not in text
    read = Page(text)
    assert "Failed: rank 1 at step 3: <script>alert(1)</script> & more" in read.text


def test_generations_are_told_once_each(tmp_path: Path) -> None:
    lost = {"kind": "generation", "number": 2, "members": ["a", "b"], "reason": "rank 2 died"}
    records = [fit(0), fit(1), *({**lost, "rank": rank, "step": 3} for rank in range(2))]
    told = section(page(tmp_path, records), "events")
    assert told.count("generation 2 of 2 ranks (a, b): rank 2 died") == 1


def test_the_page_lies_in_the_runs_folder_or_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, whole_run())
    assert write_report(tmp_path) == tmp_path / "report.html"
    other = tmp_path / "pages" / "one.html"
    assert write_report(tmp_path, other) == other
    assert other.read_text() == (tmp_path / "report.html").read_text()


def test_all_values_that_a_figure_lacks_are_bearable(tmp_path: Path) -> None:
    records = [step(0, n, loss=None, samples=None, tokens=None) for n in (1, 2, 3)]
    text = page(tmp_path, [fit(0), *records])
    assert 'id="loss"' not in text
    assert isinstance(read_run(tmp_path), RunRecords)
