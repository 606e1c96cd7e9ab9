"""The page of results beside the papers."""

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments import report
from experiments.lib import address
from experiments.lib.shipped import ROOT
from experiments.study import Study
from tests.experiments.test_study import STUDY, ToyFlags

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """The parts of a page that a browser and a screen reader use."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: set[str] = set()
        self.addresses: list[str] = []
        self.unnamed: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids.update([given["id"]] if "id" in given else [])
        if tag == "a":
            self.links.add(given["href"])
        elif source := given.get("src") or (tag == "link" and given.get("href")):
            self.addresses.append(source)
        if (tag == "img" and not given.get("alt")) or (tag == "th" and not given.get("scope")):
            self.unnamed.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def row(tmp_path: Path, name: str, holds: bool | None = True, **changes) -> report.Row:
    """The row of a study; holds: its verdict, or None for a study without a result."""
    study = Study(**{**vars(STUDY), "file": str(ROOT / f"experiments/papers/{name}.py"), **changes})
    folder = tmp_path / name
    if holds is None:
        return report.Row(study, folder, None)
    made = Study(**{**vars(STUDY), "holds": lambda values: holds})
    made.write(ToyFlags(), folder)
    found = json.loads((folder / "report.json").read_text())
    return report.Row(study, folder, found | {"study": name})


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[report.Row]:
    tmp_path = tmp_path_factory.mktemp("results")
    return [
        row(tmp_path, "vllm/fig02_squares"),
        row(tmp_path, "vllm/table1_squares", holds=False),
        row(tmp_path, "punica/fig07_kernel", holds=None, kind="not run", needs="a <GPU>"),
        row(tmp_path, "lserve/fig10a_speed", holds=None),
        row(tmp_path, "lserve/prepares"),
    ]


def test_rows_are_counted_by_kind_and_verdict(rows):
    assert [each.verdict for each in rows] == [
        report.HOLDS, report.FAILS, report.NOT_RUN, report.NONE, report.HOLDS,
    ]  # fmt: skip
    assert [each.label for each in rows] == ["Fig. 2", "Table 1", "Fig. 7", "Fig. 10a", "prepares"]
    figures = [each for each in rows if each.is_figure]
    assert len(figures) == 4
    counts = report.counted(figures)
    assert (counts["rows"], counts["with_result"], counts["claims_held"]) == (4, 2, 1)
    assert (counts["not_run"], counts["no_result"]) == (1, 1)
    assert report.by_kind(figures)["counted"][report.FAILS] == 1
    assert rows[0].within == (1, 1)


def test_flags_that_differ_from_the_setting_are_on_the_page(rows, monkeypatch):
    monkeypatch.setattr(report.Row, "stale", False)
    assert not rows[0].changed
    given = {**(rows[0].report or {}), "flags": {"sizes": [1, 2], "scale": 2.0, "how": "exact"}}
    other = report.Row(rows[0].study, rows[0].folder, given)
    assert "--scale=2.0 (1.0)" in other.changed
    assert other.changed in report.site([other])["vllm.html"]


def test_the_command_is_that_of_the_run(rows):
    full = "python -m experiments.reproduce vllm/fig02_squares --scale="
    assert rows[0].command == f"{full}full"
    with_flags = {"sizes": [1, 2], "scale": 1.0, "how": "exact"}
    run = report.Row(rows[0].study, rows[0].folder, {**(rows[0].report or {}), "flags": with_flags})
    assert run.command == f"{full}quick"
    with_flags["scale"] = 2.0
    own = "python -m experiments.papers.vllm.fig02_squares --sizes=1,2 --scale=2.0"
    assert run.command == own


def test_the_site_stands_alone_and_is_read_aloud(rows, monkeypatch):
    monkeypatch.setattr(report.Row, "stale", False)
    site = report.site(rows)
    assert set(site) == {"index.html", "vllm.html", "punica.html", "lserve.html"}
    pages = {name: Page(text) for name, text in site.items()}
    for name, page in pages.items():
        assert not page.unnamed, (name, page.unnamed)
        assert all(source.startswith("data:") for source in page.addresses)
        assert page.tags["main"] == page.tags["nav"] == page.tags["h1"] == 1
        assert max(page.ids.values()) == 1
        for link in page.links:
            target, _, anchor = link.partition("#")
            if not link.startswith("https://"):
                assert not anchor or anchor in pages[target or name].ids, link
    for each in rows:
        assert each.command in site[f"{each.paper}.html"]
    assert "a &lt;GPU&gt;" in site["punica.html"]


def test_a_folder_is_no_picture(rows):
    (rows[0].folder / "empty.png").mkdir()
    assert [path.name for path in rows[0].pictures] == ["figure.png"]


def test_tables_are_of_the_committed_results(tmp_path):
    given = report.ReportFlags(results=str(tmp_path), tables=True)
    with pytest.raises(ValueError, match="--tables writes those of the committed results"):
        report.main(given, report.PROGRAM.output)


def test_right_cases_are_counted_among_all_cases_of_a_kernel(tmp_path):
    def case(op, spec, of_bound=0.5, kernel="mosaic_gpu"):
        return {"op": op, "spec": spec, "implementation": kernel, "of_bound": of_bound,
                "repeats_to_the_bit": True}  # fmt: skip

    def peer(name, seconds):
        return {"op": "sgmv", "spec": "a", "peer": name, "seconds": seconds}

    time = {"seconds": 2e-3, "floor_seconds": 1e-3}
    content = {
        "hardware": {"jax_backend": "gpu"},
        "checks": [case("sgmv", "a"), case("sgmv", "b", 2.0), case("sgmv", "a", 1.0, "xla")],
        "failed": {"check sgmv c mosaic_gpu": "broken", "time sgmv c mosaic_gpu": "broken"},
        "left_out": ["check sgmv d mosaic_gpu", "check sgmv d xla", "engine step (no flax)"],
        "timings": [case("sgmv", "a") | time, case("sgmv", "a", kernel="xla") | time],
        "peers": [peer("fast", 1e-3), peer("absent", None)],
    }
    for folder, backend in {"h900": "gpu", "cpu": "cpu"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gpu_check.json").write_text(
            json.dumps(content | {"hardware": {"jax_backend": backend}})
        )
    checks = report.gpu_checks(tmp_path)
    assert report._right_and_timed(checks, "sgmv", "mosaic_gpu") == ("H900: 1 of 4", "H900: 1")
    assert report._right_and_timed(checks, "sgmv", "xla") == ("H900: 1 of 2", "H900: 1")
    assert report._right_and_timed(checks, "write_kv", "mosaic_gpu") == ("no", "no")
    *_, line = report.gpu_times(tmp_path).splitlines()
    assert line == "| H900 | `sgmv` | `a` | 2 | 50% | fast 1 |"


def test_the_address_goes_into_the_notebooks_and_out_again():
    (first, *_) = sorted((ROOT / "notebooks").glob("*.ipynb"))
    stored = address.stamped(first.read_text(), first.name, None)
    given = address.stamped(stored, first.name, "https://github.com/some/where")
    cells = json.loads(given)["cells"]
    assert (
        "colab.research.google.com/github/some/where/blob/main/notebooks/1_"
        in cells[0]["source"][0]
    )
    assert any("git+https://github.com/some/where" in line for line in cells[1]["source"])
    assert address.stamped(given, first.name, None) == stored


def test_notebooks_have_the_address_of_the_project():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text()
        assert address.stamped(text, path.name, address.repository()) == text, "run: make report"
