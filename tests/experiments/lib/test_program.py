"""How programs start and end: real processes, real signals, a disk that is full."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryFile

import pytest

ROOT = Path(__file__).parents[3]
# A shell starts background jobs with SIGINT ignored, and these tests may be in such a job.
START = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from experiments.lib import program, signals
from experiments.diff_events import DiffFlags
from experiments.lib.typed_flags import Flags, Output, dataclass, flag
"""
# The server imports once what all programs import, and forks a process for each program. The fork
# ends as a program does, by the end of its main thread. The server receives the folder, the
# arguments and the source, and descriptors for output and errors; it sends back the exit status.
FORKS = f"""{START}
import gc, json, socket
gc.freeze()  # otherwise each process would copy all objects to collect them at its end
channel = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
    if not request:
        sys.exit()
    child = os.fork()
    if child == 0:
        channel.close()
        folder, arguments, source = json.loads(request)
        os.chdir(folder)
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.argv = ["-c", *arguments]
        break
    for descriptor in descriptors:
        os.close(descriptor)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    channel.send(json.dumps(status).encode())
exec(source)
"""


@pytest.fixture(scope="module")
def fork():
    """Run a program's (source, *arguments) in a fork, after START; the result is as
    `subprocess.run` has it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(source: str, *arguments: str, cwd=ROOT, stdout=None, stderr=None):
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            files = [(stdout or out).fileno(), (stderr or err).fileno()]
            request = json.dumps([str(cwd), arguments, source]).encode()
            socket.send_fds(ours, [request], files)
            status = json.loads(ours.recv(100))
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, status, out.read(), err.read())

    # Python opens its streams over these pipes; a fork may put a pipe, a file or a full disk there.
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(theirs.fileno())], cwd=ROOT,
        pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as server:  # fmt: skip
        theirs.close()
        yield run
        ours.close()
    assert server.returncode == 0


@pytest.fixture(scope="module")
def run(fork):
    """Run a program whose main function is `body`; how: further arguments of `Program`."""

    def run(body: str, *arguments: str, how: str = "Flags, None", **files):
        return fork(source_of(body, how), *arguments, **files)

    return run


def source_of(body: str, how: str) -> str:
    main = "def main(flags, output):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return f"{main}\nprogram.Program(main, {how}).run()"


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_told_in_a_line(run, number, status):
    done = run(f"os.kill(os.getpid(), {int(number)})\ntime.sleep(60)")
    assert (done.returncode, done.stderr) == (status, "interrupted\n")


def test_the_first_signal_is_noted_and_the_second_interrupts(run):
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
    told = "ending in good order; another signal ends the program at once"
    assert done.stderr == f"\n{told}\ninterrupted\n"


def test_an_interrupt_is_not_lost_in_a_callback_of_the_garbage_collector(run):
    """JAX has such a callback, and Python drops exceptions that are raised in it."""
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


def test_a_refusal_is_a_line_and_a_fault_shows_where_it_was(run):
    refused = run("with program.refusals():\n    raise ValueError('no such thing')")
    assert (refused.returncode, refused.stderr) == (1, "error: no such thing\n")
    fault = run("raise ValueError('ours')")
    assert fault.returncode == 1 and "Traceback" in fault.stderr and "ours" in fault.stderr


def test_a_program_of_files_compares_them(run):
    done = run("print(flags.logs)", "a", "b", how="DiffFlags, None")
    assert (done.returncode, done.stdout) == (0, "('a', 'b')\n")


def test_the_folder_of_the_report_is_checked_before_any_work(run, tmp_path):
    how = "Flags, Output('results/none'), ('a.csv',)"
    out = tmp_path / "new" / "folder"
    done = run("print(os.listdir(output.folder))", f"--output_dir={out}", how=how)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    (out / "a.csv").mkdir()
    done = run("print('ran')", f"--output_dir={out}", how=how)
    assert (done.returncode, done.stdout) == (1, "")
    complaint = f"--output_dir={out} cannot be written to: a.csv is a folder there"
    assert done.stderr == f"error: {complaint}\n"
    # A program without a default folder needs none.
    done = run("print(repr(output.output_dir))", how="Flags, Output()")
    assert (done.returncode, done.stdout) == (0, "''\n")


def test_a_run_does_not_replace_one_with_other_flags(fork, tmp_path):
    write = "from experiments.lib import run_record\n"
    write += "run_record.write_json(output.folder, 'report.json', {'flags': flags})"
    kind = "@dataclass(frozen=True)\nclass Seeded(Flags):\n    seed: int = flag(0, 'a number')\n"

    def call(*arguments):
        return fork(kind + source_of(write, "Seeded, Output('results')"), *arguments, cwd=tmp_path)

    def seeds() -> dict[str, int]:
        paths = tmp_path.glob("*/report.json")
        return {path.parent.name: json.loads(path.read_text())["flags"]["seed"] for path in paths}

    assert call().returncode == call(f"--output_dir={tmp_path}/results").returncode == 0
    assert seeds() == {"results": 0}
    # A folder that the user names is refused; the default folder gets a number.
    named = call("--seed=1", "--output_dir=results")
    assert (named.returncode, named.stderr) == (
        1, "error: results holds another run (--seed was 0 and is 1): name another "
        "--output_dir, or let --overwrite replace it\n",
    )  # fmt: skip
    assert call("--seed=1").stdout == "results holds another run: this one is in results-2\n"
    assert call("--seed=1").returncode == 0
    assert seeds() == {"results": 0, "results-2": 1}
    assert call("--seed=2", "--overwrite").returncode == 0
    assert seeds() == {"results": 2, "results-2": 1}
    (tmp_path / "results" / "report.json").write_text("[]")
    assert (
        "holds another run (its report.json cannot be read)" in call("--output_dir=results").stderr
    )


def test_a_missing_extra_is_told_in_a_line(fork, tmp_path):
    run_it = "runpy.run_module('experiments.notebooks', run_name='__main__')"
    source = f"import runpy\nsys.modules['nbclient'] = None\n{run_it}"
    done = fork(source, f"--output_dir={tmp_path}")
    told = "error: this program needs nbclient: pip install 'paged-jax[notebooks]' brings it"
    assert done.returncode == 1 and done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "body, arguments, complaint",
    [
        ("with program.refusals():\n    raise ValueError('bad')", [], "error: bad"),
        ("raise ValueError('ours')", [], "Traceback"),
        ("open('/no/such/file')", [], "error: /no/such/file: No such file or directory\n"),
        ("print('ran')", ["x"], "error: unexpected argument 'x': flags are --name=value"),
        ("pass", ["--x=1"], "error: Unknown command line flag 'x'"),
    ],
)
def test_every_error_has_another_status_where_1_has_a_meaning(run, body, arguments, complaint):
    done = run(body, *arguments, how="Flags, None, error_status=2")
    assert done.returncode == 2 and complaint in done.stderr and not done.stdout
    assert run("return 1", how="Flags, None, error_status=2").returncode == 1


@pytest.mark.parametrize("closed", [True, False])
def test_output_that_nobody_takes_is_an_error_in_a_line(run, closed):
    if closed:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(writer, "wb") as file:
        done = run("print('a result')", stdout=file)
    assert done.returncode == 1
    assert done.stderr in (
        "error: [Errno 32] Broken pipe\n", "error: [Errno 28] No space left on device\n",
    )  # fmt: skip


def test_what_a_terminal_cannot_show_is_escaped(run):
    done = run("print('half a pair: \\ud83d')")
    assert (done.returncode, done.stdout) == (0, "half a pair: \\ud83d\n")


PROGRESS = """
    import logging, warnings
    from tqdm import tqdm
    for _ in tqdm(range(10), "going", mininterval=0):
        logging.warning("one more")
    warnings.warn("nearly")
    print("it ended", flush=True)
    raise program.Refused("nobody reads why")
    """


def test_progress_on_a_full_disk_does_not_end_a_program_or_change_its_status(run):
    with open("/dev/full", "w") as full:
        done = run(PROGRESS, stderr=full)
    assert (done.returncode, done.stdout) == (1, "it ended\n")


def test_progress_on_a_closed_descriptor_does_not_either():
    source = START + source_of(PROGRESS, "Flags, None")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", source],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "it ended\n")
