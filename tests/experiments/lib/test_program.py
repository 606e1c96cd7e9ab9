"""How programs start and end: real processes, real signals, a disk that is full."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# A shell starts what runs in the background with SIGINT ignored, and so may these tests.
START = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from experiments.lib import program, signals
from experiments.diff_events import DiffFlags
from experiments.lib.typed_flags import Flags, Output, dataclass, flag
"""


def run(
    body: str,
    *arguments: str,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    how: str = "Flags, None",
    closed: str = "",
) -> subprocess.CompletedProcess:
    """A program whose main is `body`; how: further arguments of `Program`; closed: descriptors that
    it starts without."""
    main = "def main(flags, output):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    source = f"{START}{main}\nprogram.Program(main, {how}).run()"
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", source, *arguments],
        cwd=ROOT, stdout=stdout, stderr=stderr, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_told_in_a_line(number, status):
    done = run(f"os.kill(os.getpid(), {int(number)})\ntime.sleep(60)")
    assert (done.returncode, done.stderr) == (status, "interrupted\n")


def test_the_first_signal_is_noted_and_the_second_interrupts():
    done = run(
        """
        with signals.Stop() as stop:
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested() and stop.signal is signal.SIGTERM
            print("goes on", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        """
    )
    assert (done.returncode, done.stdout) == (130, "goes on\n")
    assert done.stderr == "\nending in good order; the next signal ends at once\ninterrupted\n"


def test_an_interrupt_is_not_lost_in_a_callback_of_the_garbage_collector():
    """JAX has one, and Python drops what is raised in it."""
    done = run(
        """
        import gc
        def _xla_gc_callback(phase, _):
            if phase == "start":
                os.kill(os.getpid(), signal.SIGINT)
        gc.callbacks.append(_xla_gc_callback)
        gc.collect()
        gc.callbacks.clear()
        time.sleep(60)
        """
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_refusal_is_a_line_and_a_fault_shows_where_it_was():
    refused = run("with program.refusals():\n    raise ValueError('no such thing')")
    assert (refused.returncode, refused.stderr) == (1, "error: no such thing\n")
    fault = run("raise ValueError('ours')")
    assert fault.returncode == 1 and "Traceback" in fault.stderr and "ours" in fault.stderr


def test_an_argument_that_is_no_flag_is_refused():
    done = run("print('ran')", "model=x")
    assert done.returncode == 1 and done.stdout.count("ran") == 0
    assert "unexpected argument 'model=x': flags are --name=value" in done.stderr + done.stdout


def test_a_program_of_files_compares_them():
    done = run("print(flags.logs)", "a", "b", how="DiffFlags, None")
    assert (done.returncode, done.stdout) == (0, "('a', 'b')\n")


def test_the_folder_of_the_report_is_checked_before_any_work(tmp_path):
    how = "Flags, Output('results/none'), ('a.csv',)"
    out = tmp_path / "new" / "folder"
    done = run("print(os.listdir(output.folder))", f"--output_dir={out}", how=how)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    (out / "a.csv").mkdir()
    done = run("print('ran')", f"--output_dir={out}", how=how)
    assert (done.returncode, done.stdout) == (1, "")
    complaint = f"--output_dir={out} cannot be written to: a.csv is a folder there"
    assert done.stderr == f"error: {complaint}\n"
    # Where no folder is the default, none is needed.
    done = run("print(repr(output.output_dir))", how="Flags, Output()")
    assert (done.returncode, done.stdout) == (0, "''\n")


def test_a_run_does_not_replace_one_with_other_flags(tmp_path):
    write = "from experiments.lib import run_record\n"
    write += "run_record.write_json(output.folder, 'report.json', {'flags': flags})"
    kind = "@dataclass(frozen=True)\nclass Seeded(Flags):\n    seed: int = flag(0, 'a number')\n"

    def call(*arguments):
        source = f"{START}{kind}def main(flags, output):\n{textwrap.indent(write, '    ')}\n"
        source += "program.Program(main, Seeded, Output('results')).run()"
        return subprocess.run(
            [sys.executable, "-c", source, *arguments],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True,
        )  # fmt: skip

    def seeds() -> dict[str, int]:
        paths = tmp_path.glob("*/report.json")
        return {path.parent.name: json.loads(path.read_text())["flags"]["seed"] for path in paths}

    assert call().returncode == call(f"--output_dir={tmp_path}/results").returncode == 0
    assert seeds() == {"results": 0}
    # A folder that is named is refused, and the default one is numbered.
    named = call("--seed=1", "--output_dir=results")
    assert (named.returncode, named.stderr) == (
        1, "error: results holds a run with other flags (--seed was 0 and is 1): name another "
        "--output_dir, or let --overwrite replace it\n",
    )  # fmt: skip
    assert call("--seed=1").stdout == "results holds another run: this one is in results-2\n"
    assert call("--seed=1").returncode == 0
    assert seeds() == {"results": 0, "results-2": 1}
    assert call("--seed=2", "--overwrite").returncode == 0
    assert seeds() == {"results": 2, "results-2": 1}
    (tmp_path / "results" / "report.json").write_text("[]")
    assert "holds a run with other flags (it has none)" in call("--output_dir=results").stderr


@pytest.mark.parametrize(
    "program, lacks, extra",
    [("serve_http", "fastapi", "serve"), ("notebooks", "nbclient", "notebooks")],
)
def test_a_missing_extra_is_told_in_a_line(program, lacks, extra, tmp_path):
    run_it = f"runpy.run_module('experiments.{program}', run_name='__main__')"
    source = f"import runpy, sys\nsys.modules['{lacks}'] = None\n{run_it}"
    done = subprocess.run(
        [sys.executable, "-c", source, f"--output_dir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    told = f"error: this program needs {lacks}: pip install 'paged-jax[{extra}]' brings it"
    assert done.returncode == 1 and done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "body, arguments, complaint",
    [
        ("with program.refusals():\n    raise ValueError('bad')", [], "error: bad"),
        ("raise ValueError('ours')", [], "Traceback"),
        ("open('/no/such/file')", [], "error: /no/such/file: No such file"),
        ("pass", ["x"], "error: unexpected argument 'x'"),
        ("pass", ["--x=1"], "error: Unknown command line flag 'x'"),
    ],
)
def test_every_error_has_another_status_where_1_has_a_meaning(body, arguments, complaint):
    done = run(body, *arguments, how="Flags, None, error_status=2")
    assert done.returncode == 2 and complaint in done.stderr
    assert run("return 1", how="Flags, None, error_status=2").returncode == 1


def test_errors_of_the_system_name_the_file():
    done = run("open('/no/such/file')")
    assert (done.returncode, done.stderr) == (
        1,
        "error: /no/such/file: No such file or directory\n",
    )


@pytest.mark.parametrize("closed", [True, False])
def test_output_that_nobody_takes_is_an_error_in_a_line(closed):
    if closed:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    done = run("print('a result')", stdout=writer)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr in (
        "error: [Errno 32] Broken pipe\n", "error: [Errno 28] No space left on device\n",
    )  # fmt: skip


def test_what_a_terminal_cannot_show_is_escaped():
    done = run("print('half a pair: \\ud83d')")
    assert (done.returncode, done.stdout) == (0, "half a pair: \\ud83d\n")


@pytest.mark.parametrize("closed", ["", "2>&-"])
def test_nobody_need_read_of_progress(closed):
    """Neither a full disk nor a closed descriptor ends a program, or changes its exit status."""
    body = """
        import logging, warnings
        from tqdm import tqdm
        for _ in tqdm(range(10), "going", mininterval=0):
            logging.warning("one more")
        warnings.warn("nearly")
        print("it ended", flush=True)
        raise program.Refused("nobody reads why")
        """
    with open("/dev/full", "w") as full:
        done = run(body, stderr=full, closed=closed)
    assert (done.returncode, done.stdout) == (1, "it ended\n")
