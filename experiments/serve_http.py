"""An OpenAI-compatible HTTP server over paged KV memory (extra `serve`).

    make serve
    python -m experiments.serve_http --model=Qwen/Qwen3-0.6B --dtype=bfloat16 --port=8000
    python -m experiments.serve_http --adapters=models/bundled/adapters --adapter_slots=4

--adapters are served as models under their folders' names. SIGTERM and Ctrl-C let running requests
end, for --drain_s seconds at most; new ones are refused with status 503 meanwhile. The exit status
is then 143 or 130.
"""

from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

from experiments.lib import adapters
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.extras import extra
from experiments.lib.flags import (
    define_engine_flags,
    define_executor_flag,
    define_fields,
    fields_of,
    loading,
)
from experiments.lib.help import group
from experiments.lib.program import Options, Program, refusals
from experiments.lib.runners import ray_actors, threads
from models import checkpoint, load_tokenizer
from models.config import ModelConfig
from paged.engine import EngineConfig

with extra("serve"):
    from paged.server.app import create_app
    from paged.server.cluster_owner import ClusterOwner
    from paged.server.owner import EngineOwner, Owner
    from paged.server.run import Server, check_address
    from paged.server.service import Service
    from paged.server.settings import ServerConfig


def define_flags() -> None:
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on; 0.0.0.0 for all of the machine")
    flags.DEFINE_integer("port", 8000, "0 for any that is free", lower_bound=0, upper_bound=65535)
    flags.DEFINE_string(
        "served_model_name", "", "what requests call the model; empty for --model, or for the last "
        "part of a folder's path",
    )  # fmt: skip
    flags.DEFINE_string(
        "chat_template", "", "file of a Jinja chat template; empty for the tokenizer's own"
    )
    flags.DEFINE_string(
        "api_keys", "", "file of API keys, one a line, of which requests need one; empty for none"
    )
    flags.DEFINE_integer(
        "runners", 1, "engines, each on a device of its own, among which requests are placed and "
        "move (Punica §5)", lower_bound=1,
    )  # fmt: skip
    flags.DEFINE_bool("ray", False, "whether runners are Ray actors (extra `cluster`)")
    with group("limits"):
        define_fields(ServerConfig)
    adapters.define_flags()
    define_engine_flags()
    define_executor_flag()


def read_lines(flag: str, path: str) -> list[str]:
    """The lines of a file that are not empty. Raises ValueError if there are none."""
    lines = [line.strip() for line in Path(path).expanduser().read_text().splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"--{flag}={path}: the file is empty")
    return lines


def served_name(model: str) -> str:
    """The model's name; of a folder only the last part, as clients need not see its path."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def prepared(
    options: Options, model: ModelConfig, config: EngineConfig, tokenizer
) -> Callable[[], Owner]:
    """What makes one warm engine, or a cluster of them. Raises ValueError for what cannot be."""
    if options.runners == 1 and not options.ray:
        engine = load_engine(config, tokenizer, **loading(options))

        def one() -> Owner:
            engine.warm_up()
            return EngineOwner(engine)

        return one
    if config.tensor_parallel > 1:
        raise ValueError("--tensor_parallel: each engine of a cluster has one device")
    if options.executor != "device":
        raise ValueError(f"--executor={options.executor} is for one engine: --runners=1")
    try:
        make = ray_actors if options.ray else threads
        live = make(options, model, config, options.runners, tokenizer)
    except ImportError as error:
        raise ValueError(f"--ray: {error}") from error
    return lambda: ClusterOwner(live.__enter__())


def main(options: Options) -> int:
    if options.runners > 1 and not options.ray:  # a CPU is as many devices as it is told at first
        jax.config.update("jax_num_cpu_devices", options.runners)
    with refusals():
        settings = ServerConfig(**fields_of(ServerConfig, options))
        check_address(options.host, options.port)
        model = checkpoint.load_config(options.model)
        config = engine_config(model, **fields_of(EngineConfig, options))
        tokenizer = load_tokenizer(options.model)
        keys = read_lines("api_keys", options.api_keys) if options.api_keys else []
        template = None
        if options.chat_template:
            template = Path(options.chat_template).expanduser().read_text()
        if options.adapters.isdecimal() and not options.output_dir:
            raise ValueError(f"--adapters={options.adapters}: random adapters need --output_dir")
        served = adapters.asked_for(options, model, config)
        make_owner = prepared(options, model, config, tokenizer)
    owner = make_owner()
    name = options.served_model_name or served_name(options.model)
    service = Service(
        owner, model, config, tokenizer, name, settings, template,
        logprobs=options.executor == "device",
    )  # fmt: skip
    for adapter in served:
        service.adapters.add(adapter)
    server = Server(create_app(service, keys), service, options.host, options.port)
    try:
        server.run()
    finally:
        owner.close()
    if not server.started:  # uvicorn has told why
        return 1
    return 128 + server.stopped_by if server.stopped_by else 0


PROGRAM = Program(main, define_flags, "", output_help="where random --adapters are written")

if __name__ == "__main__":
    PROGRAM.run()
