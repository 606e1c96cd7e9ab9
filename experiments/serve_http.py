"""An OpenAI-compatible HTTP server over paged KV memory (extra `serve`).

    make serve
    python -m experiments.serve_http --model=Qwen/Qwen3-0.6B --dtype=bfloat16 --port=8000
    python -m experiments.serve_http --adapters=models/bundled/adapters --adapter_slots=4

--adapters are served as models under their folders' names. SIGTERM and Ctrl-C let running requests
end, for --drain_s seconds at most; new ones are refused with status 503 meanwhile. The exit status
is then 143 or 130.
"""

import logging
from pathlib import Path

from absl import flags

from experiments.lib import adapters
from experiments.lib.engines import engine_config, load_engine
from experiments.lib.flags import define_engine_flags, define_fields, fields_of, loading
from experiments.lib.program import Options, Program, refusals
from models import checkpoint, load_tokenizer
from paged.engine import EngineConfig
from paged.server.app import create_app
from paged.server.owner import EngineOwner
from paged.server.run import Server
from paged.server.service import Service
from paged.server.settings import ServerConfig


def define_flags() -> None:
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on; 0.0.0.0 for all of the machine")
    flags.DEFINE_integer("port", 8000, "0 for any that is free", lower_bound=0, upper_bound=65535)
    flags.DEFINE_string("served_model_name", "", "what requests call the model; empty for --model")
    flags.DEFINE_string(
        "chat_template", "", "file of a Jinja chat template; empty for the tokenizer's own"
    )
    flags.DEFINE_string(
        "api_keys", "", "file of API keys, one a line, of which requests need one; empty for none"
    )
    define_fields(ServerConfig)
    adapters.define_flags()
    define_engine_flags()


def read_lines(flag: str, path: str) -> list[str]:
    """The lines of a file that are not empty. Raises ValueError if there are none."""
    lines = [line.strip() for line in Path(path).expanduser().read_text().splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"--{flag}={path}: the file is empty")
    return lines


def main(options: Options) -> int:
    with refusals():
        settings = ServerConfig(**fields_of(ServerConfig, options))
        model = checkpoint.load_config(options.model)
        config = engine_config(model, **fields_of(EngineConfig, options))
        tokenizer = load_tokenizer(options.model)
        keys = read_lines("api_keys", options.api_keys) if options.api_keys else []
        template = None
        if options.chat_template:
            template = Path(options.chat_template).expanduser().read_text()
        served = adapters.asked_for(options, model, config)
        engine = load_engine(config, tokenizer, **loading(options))
    engine.warm_up()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    owner = EngineOwner(engine)
    name = options.served_model_name or options.model
    service = Service(owner, model, config, tokenizer, name, settings, template)
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


PROGRAM = Program(main, define_flags)

if __name__ == "__main__":
    PROGRAM.run()
