"""Many adapters over few slots, loaded on this machine while steps run (Punica §5.2).

python -m experiments.papers.punica.adapter_slots_cpu

The bundled model serves requests for --adapters random LoRA adapters, which arrive faster than they
can be served. The run is checked by its log: no request is overtaken more often than
`max_overtakes` allows, and a replay on a second engine computes all tokens again and gives the same
events.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from experiments import serve
from experiments.lib import random_adapters
from experiments.lib.engines import load_engine
from experiments.lib.typed_flags import flag
from experiments.papers.punica.adapter_slots import (
    Row,
    SlotFlags,
    check,
    check_replay,
    config_of,
    make_requests,
    row_of,
)
from experiments.study import Run, Setting, Study, Values
from models import checkpoint
from paged.engine import Engine


@dataclass(frozen=True)
class CpuFlags(SlotFlags):
    adapters: int = flag(40, "that requests name", least=1)
    requests: int = flag(80, "in all", least=1)
    rate: float = flag(40.0, "requests a second", least=1e-3)


def engine_of(flags: CpuFlags, folder: Path) -> Engine:
    """An engine that knows the adapters, which it writes to `folder`."""
    model = checkpoint.load_config("bundled")
    engine = load_engine(config_of(flags))
    for i in range(flags.adapters):
        name = f"lora-{i:03}"
        engine.add_adapter(name, random_adapters.write(folder / name, model, flags.seed + i))
    return engine


def serve_all(flags: CpuFlags) -> Row:
    """Serve all requests, and check the run by a replay on a second engine."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(flags, Path(folder))
        names = engine.adapters.names
        vocab_size = engine.model.vocab_size
        requests = make_requests(
            flags.requests, flags.rate, names, flags.zipf, vocab_size, flags.seed
        )
        engine.warm_up()
        serve.run(engine, requests)
        check_replay(engine, lambda log: load_engine(config_of(flags)))
    return replace(row_of(engine), engine="measured")


def measure(flags: CpuFlags, run: Run) -> Iterator[Row]:
    yield run.once(serve_all, flags)


def values(_: CpuFlags, rows: Sequence[Row]) -> Values:
    (row,) = rows
    names = ("ttft_mean_s", "ttft_p99_s", "loads", "hidden", "hit_rate", "most_overtaken")
    return {name: getattr(row, name) for name in names} | {"load_ms": 1e3 * row.load_s}


def draw(_: CpuFlags, figure: Figure, rows: Sequence[Row]) -> None:
    (row,) = rows
    axes = figure.subplots()
    shares = {"load time beside steps": row.hidden, "adapter on the device": row.hit_rate}
    axes.barh(list(shares), list(shares.values()), color=["#2f6b9a", "#c8553d"])
    axes.set(xlim=(0, 1), xlabel="share")


STUDY = Study(
    __file__,
    title="Many adapters over few slots on this machine (Punica §5.2)",
    kind="measured",
    claim="most of the time in which adapters are loaded passes while steps run",
    rule="0.5 of the load time beside steps; a replay computes the same tokens",
    holds=lambda v: v["hidden"] >= 0.5,
    setting=Setting(
        "the bundled model, 40 random adapters by a Zipf law over 8 slots",
        "the claim is ours; the paper has no such figure",
        "reduced",
    ),
    flags=CpuFlags,
    measure=measure,
    values=values,
    check=check,
    draw=draw,
    quick={"adapters": 12, "requests": 20},
    minutes=(1, 1),
    size=(7, 2),
)

if __name__ == "__main__":
    STUDY.run()
