"""The server as a program: signals under load, bad flags, and a low limit of open files."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from experiments.serve_http import served_name
from tests.experiments.test_bad_flags import RUNNER

pytestmark = pytest.mark.slow  # processes of their own
ROOT = Path(__file__).parents[3]
FLAGS = [
    "--port=0", "--max_model_len=2048", "--kv_cache_tokens=8192", "--max_num_seqs=16",
    "--drain_s=1.0", "--executor=simulated",
]  # fmt: skip


@contextlib.contextmanager
def started(*before: str):
    """A server over a simulated engine: its process, its first lines of stderr, and its address."""
    command = [*before, sys.executable, "-m", "experiments.serve_http", *FLAGS]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"running on (http://[\d.:]+)", line):
                break
        else:
            pytest.fail(f"the server did not start: {said}")
        yield process, said, found[1]
        process.kill()


@pytest.fixture
def program():
    with started() as (process, _, url):
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, url


def test_sigterm_in_the_middle_of_load(program):
    """Every accepted request ends, whole or with an error, and then the process ends."""
    process, url = program
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
    ended: list[str] = []

    def ask(i: int) -> None:
        for turn in range(1000):
            how: dict[str, Any] = {"model": "bundled", "prompt": "a cat", "max_tokens": 1000}
            how |= {"seed": turn, "extra_body": {"ignore_eos": True}}
            try:
                if i % 2:
                    answer = client.completions.create(**how)
                    assert answer.choices[0].finish_reason == "length"
                else:
                    *_, last = client.completions.create(**how, stream=True)
                    assert last.choices[0].finish_reason == "length"
                ended.append("whole")
            except openai.APIStatusError as error:
                assert error.status_code == 503
                ended.append("refused")
                return
            except openai.APIConnectionError:  # the port is closed
                ended.append("not accepted")
                return
            except openai.APIError as error:
                assert "shut down" in str(error)
                ended.append("error")
                return

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, i) for i in range(12)]
        while not ended and not any(future.done() for future in asked):
            time.sleep(0.01)
        assert httpx2.get(f"{url}/health", timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        for future in asked:
            future.result(60)
    assert len(ended) > len(asked) and len(set(ended)) > 1
    assert process.wait(30) == 128 + signal.SIGTERM


def test_the_second_signal_ends_it_at_once(program):
    """The process ends although a connection is open; a client that still sends a body gets 503."""
    process, url = program
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert httpx2.get(f"{url}/health", timeout=30).status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="logprobs: a simulated device"):
            client.completions.create(model="bundled", prompt="a cat", logprobs=2)
        how: dict[str, Any] = {"model": "bundled", "prompt": ["a cat"] * 100, "max_tokens": 2000}
        stream = client.completions.create(stream=True, extra_body={"ignore_eos": True}, **how)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert b"503" in connection.recv(1000)
    assert process.wait(30) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_bad_flags_are_told_before_the_weights_are_read():
    flags = {
        # This case is first, because a process counts its devices only once.
        "--runners=2 --tensor_parallel=2": "--tensor_parallel: each engine of a cluster has one",
        "--max_pending=0": "max_pending must be at least 1, not 0",
        "--max_prompts=9 --max_pending=5": "max_prompts must be from 1 to max_pending (5), not 9",
        "--drain_s=-1": "drain_s must be at least 0",
        "--api_keys=/no/keys": "/no/keys: No such file",
        "--api_keys=/dev/null": "--api_keys=/dev/null: the file is empty",
        "--chat_template=/no/template": "/no/template: No such file",
        "--runners=0": "--runners must be at least 1, not 0",
        "--adapters=models/bundled/adapters": "adapters need adapter_slots",
        "--adapters=3 --adapter_slots=2": "--adapters=3: random adapters need --output_dir",
        "--port=70000": "port",
        "--host=192.0.2.1": "--host=192.0.2.1 --port=8000: Cannot assign",
        "--host=nobody.invalid": "--host=nobody.invalid --port=8000: ",
    }
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER], cwd=ROOT, capture_output=True, text=True,
        input=json.dumps({"serve_http": [each.split() for each in flags]}),
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error"},
    )  # fmt: skip
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(told) == len(flags), ended.stderr
    for (_, status, text), wanted in zip(told, flags.values()):
        assert status == 1 and text.startswith("error: ") and wanted in text, text
        assert text.count("\n") == 1


def test_a_folder_is_served_under_its_last_name(tmp_path: Path):
    assert served_name(str(tmp_path / "mine")) == str(tmp_path / "mine")  # a name on the hub
    (tmp_path / "mine").mkdir()
    assert served_name(str(tmp_path / "mine")) == served_name(f"{tmp_path}/mine/") == "mine"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_too_few_files_are_told_at_the_start_and_stop_nobody():
    """The system's limit of open files is lower than the number that all connections need."""
    limited = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    with started(*limited) as (process, lines, url), contextlib.ExitStack() as open_:
        said = re.search(r"(\d+) connections at a time, not 4096: .*256 files", lines)
        assert said
        host, port = url.removeprefix("http://").split(":")
        for _ in range(300):
            open_.enter_context(socket.create_connection((host, int(port)), timeout=60))
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
        assert f"{said[1]} connections are open" in next(process.stderr)
