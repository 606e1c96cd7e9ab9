"""An OpenAI-compatible HTTP server over paged KV memory (extra `serve`).

    make serve
    python -m experiments.serve_http --model=Qwen/Qwen3-0.6B --dtype=bfloat16 --port=8000
    python -m experiments.serve_http --adapters=models/bundled/adapters --adapter_slots=4

Each adapter of --adapters is served as a model named like its folder. After SIGTERM or Ctrl-C,
running requests may end within --drain_s seconds, while new requests are refused with status 503.
The exit status is then 143 (SIGTERM) or 130 (Ctrl-C).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.lib import adapters
from experiments.lib.adapters import adapters_flag
from experiments.lib.engines import load_engine
from experiments.lib.flags import loading
from experiments.lib.program import Program, extra, refusals
from experiments.lib.runners import ray_actors, threads
from experiments.lib.typed_flags import ExecutorFlags, Output, flag, part
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from paged.engine import EngineConfig

with extra("serve"):
    from paged.server.app import Server, check_address, create_app
    from paged.server.engine_client import Client, ClusterClient, EngineClient
    from paged.server.service import Service
    from paged.server.settings import ServerConfig


@dataclass(frozen=True)
class ServerFlags(ExecutorFlags):
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all of the machine")
    port: int = flag(8000, "0 for any that is free", least=0, most=65535)
    served_model_name: str = flag(
        "", "the model's name in requests; empty: --model, or the last part of a folder's path"
    )  # fmt: skip
    chat_template: str = flag("", "file of a Jinja chat template; empty for the tokenizer's own")
    api_keys: str = flag(
        "", "file of API keys, one a line; a request needs one of them; empty for none"
    )
    runners: int = flag(
        1, "engines, each on a device of its own, among which requests are placed and move "
        "(Punica §5)", least=1,
    )  # fmt: skip
    ray: bool = flag(False, "whether runners are Ray actors (extra `cluster`)")
    adapters: str = adapters_flag()
    engine: EngineConfig = part(EngineConfig())
    limits: ServerConfig = part(ServerConfig())

    @classmethod
    def begin(cls, values: Mapping[str, Any]) -> None:
        # The number of JAX's CPU devices can only be set before JAX's first use.
        if values["runners"] > 1 and not values["ray"]:
            jax.config.update("jax_num_cpu_devices", values["runners"])


def read_lines(flag: str, path: str) -> list[str]:
    """The non-empty lines of a file. Raises ValueError if there are none."""
    lines = [line.strip() for line in Path(path).expanduser().read_text().splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"--{flag}={path}: the file is empty")
    return lines


def served_name(model: str) -> str:
    """The model's name; for a folder, the last part of its path, to hide the path from clients."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def prepared(flags: ServerFlags, model: ModelConfig, tokenizer) -> Callable[[], Client]:
    """A function that makes the client of one warm engine, or of a cluster. Raises ValueError for
    invalid flags."""
    config = flags.engine
    if flags.runners == 1 and not flags.ray:
        engine = load_engine(config, tokenizer, **loading(flags))

        def one() -> Client:
            engine.warm_up()
            return EngineClient(engine)

        return one
    if config.tensor_parallel > 1:
        raise ValueError("--tensor_parallel: each engine of a cluster has one device")
    if flags.executor != "device":
        raise ValueError(f"--executor={flags.executor}: only for one engine, without --ray")
    try:
        make = ray_actors if flags.ray else threads
        live = make(flags, model, config, flags.runners, tokenizer)
    except ImportError as error:
        raise ValueError(f"--ray: {error}") from error
    return lambda: ClusterClient(live.__enter__())


def main(flags: ServerFlags, output: Output) -> int:
    config = flags.engine
    with refusals():
        check_address(flags.host, flags.port)
        model = checkpoint.load_config(flags.model)
        tokenizer = load_tokenizer(flags.model)
        keys = read_lines("api_keys", flags.api_keys) if flags.api_keys else []
        template = None
        if flags.chat_template:
            template = Path(flags.chat_template).expanduser().read_text()
        if flags.adapters.isdecimal() and not output.output_dir:
            raise ValueError(f"--adapters={flags.adapters}: random adapters need --output_dir")
        served = adapters.asked_for(flags.adapters, model, config, flags.dtype, output.folder)
        make_client = prepared(flags, model, tokenizer)
    client = make_client()
    name = flags.served_model_name or served_name(flags.model)
    service = Service(
        client, model, config, tokenizer, name, flags.limits, template,
        logprobs=flags.executor == "device", dtype=flags.dtype,
    )  # fmt: skip
    for adapter in served:
        service.adapters.add(adapter)
    server = Server(create_app(service, keys), service, flags.host, flags.port)
    try:
        server.run()
    finally:
        client.close()
    if not server.started:  # uvicorn has logged why
        return 1
    return 128 + server.stopped_by if server.stopped_by else 0


PROGRAM = Program(main, ServerFlags, Output())

if __name__ == "__main__":
    PROGRAM.run()
