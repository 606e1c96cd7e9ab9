"""The server's live page in a headless Chromium, while the server is busy.

    make check-page
    python -m experiments.check_page --policy=lserve

Starts the server, sends requests at --request_rate, and opens the page in a browser that cannot
reach other machines. Checks that

- the page shows rates, requests and the memory map while the server is busy;
- the page shows an idle server after the last request;
- the page's scripts have no errors.

Needs Chromium (Debian's package `chromium`). The exit status is 1 if a check fails. Writes to
--output_dir: page.png, server.log, report.json and summary.json.
"""

import asyncio
import shutil
import threading
from dataclasses import dataclass

from experiments.bench import http_load
from experiments.bench.http_load import HOST, open_loop
from experiments.lib import run_record
from experiments.lib.adapters import adapters_flag, asked_for
from experiments.lib.flags import loading
from experiments.lib.program import Program, extra, refusals
from experiments.lib.typed_flags import ExecutorFlags, Output, flag, part
from experiments.serve_http import ServerFlags
from experiments.workloads import workloads
from experiments.workloads.workloads import Vocabulary, WorkloadConfig
from models import checkpoint, load_tokenizer
from paged.engine import EngineConfig
from paged.server.settings import ServerConfig

with extra("test"):
    from playwright.sync_api import Page, TimeoutError, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Host names other than 127.0.0.1 do not resolve.
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
WIDTH, HEIGHT = 1180, 1000
SHOWN_S = 30.0  # longest wait until the page shows a state
TILE = "+[...document.querySelectorAll('.tile')].find(t => t.textContent.includes('{}'))"
NUMBER = TILE + ".querySelector('b').textContent.replace(/[^0-9.]/g, '')"
PAINTED = (
    "[...document.querySelectorAll('.map')].some(c => c.getContext('2d')"
    ".getImageData(0, 0, c.width, c.height).data.some(x => x))"
)
BUSY = {
    "tokens are generated": NUMBER.format("generated tokens/s") + " > 0",
    "steps are run": NUMBER.format("steps/s") + " > 0",
    "requests run": NUMBER.format("running") + " > 0",
    "KV memory is in use": NUMBER.format("KV memory in use") + " > 0",
    "requests are listed": "document.querySelectorAll('#requests tr').length > 1",
    "the memory map is painted": PAINTED,
}
IDLE = {
    "no request runs": NUMBER.format("running") + " === 0",
    "no request is listed": "document.querySelectorAll('#requests tr').length === 1",
}


@dataclass(frozen=True)
class PageFlags(ExecutorFlags):
    request_rate: float = flag(10.0, "Poisson arrivals per second", least=0.1)
    seconds: float = flag(20.0, "in which requests come", least=1)
    adapters: str = adapters_flag()
    engine: EngineConfig = part(EngineConfig())
    limits: ServerConfig = part(ServerConfig())


def browser_path() -> str:
    """The path of a browser. Raises ValueError if none is on the PATH."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        raise ValueError(
            f"no browser: none of {', '.join(NAMES)} is on the PATH; on Debian, "
            "`apt-get install chromium` brings one"
        )
    return found


def becomes_true(page: Page, expression: str) -> bool:
    """Whether a JavaScript expression becomes true within `SHOWN_S`; an exception means false."""
    test = f"() => {{ try {{ return {expression}; }} catch {{ return false; }} }}"
    try:
        page.wait_for_function(test, timeout=1e3 * SHOWN_S)
    except TimeoutError:
        return False
    return True


def main(flags: PageFlags, output: Output) -> int:
    output_dir, config = output.folder, flags.engine
    with refusals():
        browser = browser_path()
        model = checkpoint.load_config(flags.model)
        adapters = asked_for(flags.adapters, model, config, flags.dtype, output_dir)
        served = [adapter.name for adapter in adapters]
        wanted = WorkloadConfig(
            "sharegpt", num_requests=round(flags.request_rate * flags.seconds),
            request_rate=flags.request_rate, seed=config.seed,
        )  # fmt: skip
        longest = min(config.max_model_len, config.kv_cache_tokens)
        vocabulary = Vocabulary(load_tokenizer(flags.model), model.vocab_size, longest)
        trace = workloads.load(wanted, vocabulary).requests
    given = str(output_dir / "adapters") if flags.adapters.isdecimal() else flags.adapters
    server = ServerFlags(
        **loading(flags),
        adapters=given,
        served_model_name=flags.model,
        engine=config,
        limits=flags.limits,
    )
    names = [flags.model, *served]
    requests = [
        http_load.completion(names[i % len(names)], request, i % 2 == 0)
        for i, request in enumerate(trace)
    ]
    trouble: list[str] = []
    with (
        http_load.running_server(server, output_dir / "server.log") as port,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=browser, args=[ALONE]) as chromium,
    ):
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda said: trouble.extend([said.text] * (said.type == "error")))
        arrivals = [request.arrival_s for request in trace]
        load = threading.Thread(target=lambda: asyncio.run(open_loop(port, requests, arrivals)))
        load.start()
        page.goto(f"http://{HOST}:{port}/")
        shown = {what: becomes_true(page, test) for what, test in BUSY.items()}
        load.join(flags.seconds / 2)
        picture = page.screenshot()
        load.join()
        shown |= {what: becomes_true(page, test) for what, test in IDLE.items()}
    run_record.write_whole(output_dir / "page.png", picture)
    facts = {"experiment": "check_page", "flags": flags, "shown": shown, "errors": trouble}
    run_record.write_json(output_dir, "report.json", facts | run_record.describe_environment())
    failed = [what for what, true in shown.items() if not true] + trouble
    run_record.write_summary(output_dir, {"shown": sum(shown.values()), "failed": len(failed)})
    for what in failed:
        print(f"FAILED: {what}")
    print(f"{sum(shown.values())} of {len(shown)} checks passed; {output_dir}/page.png shows it")
    return int(bool(failed))


PROGRAM = Program(main, PageFlags, Output("results/check_page"), ("page.png", "server.log"))

if __name__ == "__main__":
    PROGRAM.run()
