"""Every figure and table of the reproduced papers has a study; a study that is not run here states
its needs and its command."""

import re

from experiments import reproduce
from experiments.papers import kernels
from experiments.report import PAPERS, PRINTED, Row
from experiments.study import Study

FIGURES = {
    "vllm": range(1, 20), "punica": range(1, 14), "lserve": range(2, 17), "diffkv": range(1, 18),
}  # fmt: skip
TABLES = {"vllm": range(1, 2), "punica": (), "lserve": range(1, 9), "diffkv": range(1, 4)}
STUDIES = reproduce.studies()


def printed(study: Study) -> set[str]:
    """The figures and tables in the brackets of a study's title, as fig3 and table1."""
    found = set()
    for text in PRINTED.findall(study.title.rpartition("(")[2]):
        kind = "table" if text.startswith("Table") else "fig" if text.startswith("Fig") else "alg"
        spans = re.findall(r"(\d+)\w*(?: to (\d+))?", text)
        for first, last in spans:
            found |= {f"{kind}{n}" for n in range(int(first), int(last or first) + 1)}
    return found


def test_every_figure_and_table_has_a_study():
    for paper in PAPERS:
        rows = [s for name, s in STUDIES.items() if name.startswith(f"{paper}/")]
        covered = set().union(*(printed(s) for s in rows if _is_figure(s)))
        figures, tables = FIGURES.get(paper, ()), TABLES.get(paper, ())
        wanted = {f"fig{n}" for n in figures} | {f"table{n}" for n in tables}
        assert not wanted - covered, f"{paper} lacks {', '.join(sorted(wanted - covered))}"


def _is_figure(study: Study) -> bool:
    return Row(study, reproduce.ROOT, None).is_figure


def test_rows_that_are_not_run_have_a_command_of_their_own():
    not_run = {name: study for name, study in STUDIES.items() if study.kind == "not run"}
    assert len(not_run) >= 11
    for name, study in not_run.items():
        module = f"experiments.papers.{name.replace('/', '.')}"
        assert study.needs and module in study.command and study.setting.differs


def test_no_kernels_row_is_decided_by_a_cpus_clock():
    names = (
        "vllm/fig18a_kernel_latency", "punica/fig07_sgmv_roofline", "punica/fig08_lora_operator",
        "punica/fig09_lora_ranks", "lserve/fig12_prefill_kernel", "lserve/table1_page_size",
        "diffkv/fig13_compaction",
    )  # fmt: skip
    assert all(STUDIES[name].kind == "not run" for name in names)


def test_predictions_are_those_of_the_committed_tables():
    """A call's predicted time follows from its bytes, at the share of the bandwidth that its loop
    reaches, and from its launches."""
    from pallas_kernels.lora.specs import SHAPES

    for spec in ("llama-2-7b-distinct", "llama-2-7b-identical", "llama-2-7b-up"):
        call = kernels.compiled("h200", "sgmv", spec, "sgmv_shrink")
        least, most = call.call_us(SHAPES[spec].cost)
        assert abs(least - call.us[0]) <= 0.6 and abs(most - call.us[1]) <= 0.6
