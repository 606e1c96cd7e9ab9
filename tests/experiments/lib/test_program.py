"""How programs end: real processes, real signals, a disk that is full."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
START = "import os, signal, sys, time\nfrom experiments.lib import program, signals\n"


def run(body: str, *arguments: str, stdout=subprocess.PIPE) -> subprocess.CompletedProcess:
    """A program whose main is `body`."""
    main = "def main(options):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    source = f"{START}{main}\nprogram.Program(main, lambda: None).run()"
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True,
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
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "interrupted\n")


def test_a_refusal_is_a_line_and_a_fault_shows_where_it_was():
    refused = run("with program.refusals():\n    raise ValueError('no such thing')")
    assert (refused.returncode, refused.stderr) == (1, "error: no such thing\n")
    fault = run("raise ValueError('ours')")
    assert fault.returncode == 1 and "Traceback" in fault.stderr and "ours" in fault.stderr


def test_an_argument_that_is_no_flag_is_refused():
    done = run("print('ran')", "model=x")
    assert done.returncode == 1 and done.stdout.count("ran") == 0
    assert "unexpected argument 'model=x': flags are --name=value" in done.stderr + done.stdout


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
