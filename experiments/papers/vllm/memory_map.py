"""A map of the owners of KV blocks over the steps (vLLM Figs. 3, 6 to 9), from an engine's run.

    python -m experiments.papers.vllm.memory_map

The program serves a few requests in a cache too small for all, and draws the physical blocks over
the steps. A request arrives every --interval steps. Each request has a colour, and each of its
sequences a shade. Shared blocks are hatched, and darker with more owners. Blocks that only the
prefix cache keeps are grey. The lower panel shows the host's blocks, with swapped-out sequences.

--requests are

    plain      one sequence
    prefix     one sequence; all prefix requests begin with the same --prefix_tokens tokens
    parallelN  N samples of one prompt (Fig. 8)
    beamN      a beam search of width N (Fig. 9)

The program also writes memory_map.html. A slider selects a step; the page shows the step's block
tables and each block's owners, logical block, filled slots and references. rows.csv has the use of
the cache's token slots in each step.
"""

import colorsys
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.lib import run_record
from experiments.lib.engines import EXECUTORS, load_engine
from experiments.lib.flags import loading
from experiments.lib.typed_flags import ModelFlags, flag
from experiments.papers.vllm.fig15_sharing_savings import story_tokens
from experiments.papers.vllm.snapshots import Owner, Snapshot, run
from experiments.study import Run, Setting, Study, Values
from models import checkpoint, load_tokenizer
from paged.engine import EngineConfig
from paged.kv_cache import policy_of
from paged.kv_cache.policy import ShardedModel
from paged.metrics import StepRecord
from paged.requests.sampling_params import SamplingParams
from paged.validation import validated_prompt

# 48 small blocks show every mechanism; the map of a larger cache would be unreadable.
DEFAULTS = EngineConfig(
    page_size=8,
    kv_cache_tokens=384,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    max_model_len=256,
    prefix_caching=True,
    # Run-ahead would apply the previous step's results before a snapshot.
    run_ahead=False,
)
TEMPLATE = Path(__file__).with_suffix(".html")
IDLE = "#bdbdbd"


@dataclass(frozen=True)
class MapFlags(ModelFlags):
    requests: tuple[str, ...] = flag(
        ("plain", "prefix", "parallel3", "beam4", "prefix", "plain"), "see the head of this file"
    )
    prompt_tokens: int = flag(44, "of each request", least=1)
    prefix_tokens: int = flag(32, "that `prefix` requests share", least=1)
    output_tokens: int = flag(48, "of each sequence", least=1)
    interval: int = flag(8, "steps between requests", least=1)
    executor: str = flag("device", "what runs the steps", choices=EXECUTORS)
    engine: EngineConfig = DEFAULTS


@dataclass(frozen=True)
class Row:
    """A step.

    token_states to shared: tokens, as in `paged.kv_cache.usage.Usage`.
    most_owners: largest number of owners of a block.
    shared_blocks: blocks with several owners.
    idle_blocks: blocks that only the prefix cache keeps.
    host_blocks: blocks in use in the host's memory.
    preemptions: preemptions in this step.
    swapped_out, swapped_in, copied_blocks: blocks moved in this step.
    """

    step: int
    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int
    most_owners: int
    shared_blocks: int
    idle_blocks: int
    host_blocks: int
    preemptions: int
    swapped_out: int
    swapped_in: int
    copied_blocks: int


def make_requests(
    kinds: Sequence[str], prompt_tokens: int, prefix_tokens: int, output_tokens: int, seed: int,
    tokenizer,
) -> dict[str, tuple[list[int], SamplingParams]]:  # fmt: skip
    """Prompts and sampling parameters by request id, KIND-INDEX.

    Raises ValueError for an unknown kind, and unless 0 < prefix_tokens < prompt_tokens.
    """
    if not 0 < prefix_tokens < prompt_tokens:
        raise ValueError(
            f"--prefix_tokens ({prefix_tokens}) must be above 0 and below --prompt_tokens "
            f"({prompt_tokens})"
        )

    requests = {}
    prefix = story_tokens(tokenizer, prefix_tokens, seed)
    for i, kind in enumerate(kinds):
        how: dict[str, Any] = {}
        prompt = story_tokens(tokenizer, prompt_tokens, seed + 1 + i)
        if kind == "prefix":
            prompt[:prefix_tokens] = prefix
        elif match := re.fullmatch(r"(parallel|beam)(\d+)", kind):
            count = int(match[2])
            how = {"n": count, "temperature": 1.0}
            if match[1] == "beam":
                how = {"n": count, "beam_width": count}
        elif kind != "plain":
            raise ValueError(f"--requests may be plain, prefix, parallelN and beamN, not {kind!r}")
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=seed + i, **how)
        requests[f"{kind}-{i}"] = prompt, sampling
    return requests


def colours(requests: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each request, red, green and blue in [0, 1]."""
    grey = 7
    palette = np.delete(np.array(colormaps["tab10"](range(10)))[:, :3], grey, axis=0)
    return {name: tuple(palette[i % len(palette)].tolist()) for i, name in enumerate(requests)}


def shade(colour: tuple[float, float, float], owners: Sequence[Owner]) -> tuple:
    """The colour of a block. A block with one owner has the shade of the owner's sequence. A block
    with several owners is darker the more owners it has."""
    hue, light, saturation = colorsys.rgb_to_hls(*colour)
    if len(owners) > 1:
        light *= max(0.3, 0.9 - 0.12 * len(owners))
    else:
        light += (1 - light) * min(0.6, 0.15 * (1 + owners[0].sequence))
    return colorsys.hls_to_rgb(hue, light, saturation)


def _draw(axes: Axes, held: Sequence[Mapping[int, list[Owner]]], idle, blocks: int, of) -> None:
    """Draw blocks 1 to `blocks` over the steps.

    held: owners of each owned block, by step.
    idle: idle blocks, by step.
    of: colours by request.
    """
    image = np.ones((blocks, len(held), 3))
    shared = np.zeros((blocks, len(held)))
    for step, owners_of in enumerate(held):
        for block in idle[step]:
            image[block - 1, step] = to_rgb(IDLE)
        for block, owners in owners_of.items():
            image[block - 1, step] = shade(of[owners[0].request], owners)
            shared[block - 1, step] = len(owners) > 1
    axes.imshow(
        image, aspect="auto", interpolation="nearest", origin="lower",
        extent=(-0.5, len(held) - 0.5, 0.5, blocks + 0.5),
    )  # fmt: skip
    for row, of_block in enumerate(shared):
        changes = np.flatnonzero(np.diff(of_block, prepend=0, append=0))
        runs = [(first - 0.5, end - first) for first, end in changes.reshape(-1, 2)]
        axes.broken_barh(
            runs, (row + 0.5, 1), facecolor="none", edgecolor="#000000", hatch="//////", linewidth=0
        )


def draw(
    snapshots: Sequence[Snapshot], requests: Sequence[str], title: str, footer: str = ""
) -> Figure:
    of, blocks = colours(requests), len(snapshots[0].refcounts) - 1
    host_blocks = max((max(s.host) for s in snapshots if s.host), default=1)
    figure = run_record.new_figure(11, 7.5)
    device, host = figure.subplots(
        2, 1, sharex=True, height_ratios=[blocks, max(host_blocks, blocks // 5)]
    )
    _draw(device, [s.device for s in snapshots], [s.idle for s in snapshots], blocks, of)
    device.set(ylabel="physical block")
    _draw(host, [s.host for s in snapshots], [[] for _ in snapshots], host_blocks, of)
    host.set(xlabel="step", ylabel="host block")
    patches = [Patch(color=of[name], label=name) for name in requests]
    patches += [
        Patch(facecolor="#888888", hatch="//////", label="shared"),
        Patch(color=IDLE, label="no owner"),
    ]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize="x-small", color="#666666", x=0.01, ha="left")
    return figure


def page_data(
    snapshots: Sequence[Snapshot], requests: Sequence[str], page_size: int, title: str
) -> dict[str, Any]:
    """The data of memory_map.html.

    A block is [number, references, colour, [[request, sequence, logical block, filled tokens], …]].
    Colours and requests are indices into lists.
    """
    place = {name: i for i, name in enumerate(requests)}
    of, palette = colours(requests), {IDLE: 0}

    def listed(held: Mapping[int, list[Owner]], refcounts: Sequence[int] | None) -> list:
        blocks = []
        for block, owners in sorted(held.items()):
            colour = to_hex(shade(of[owners[0].request], owners))
            references = len(owners) if refcounts is None else refcounts[block]
            names = [[place[o.request], o.sequence, o.logical, o.filled] for o in owners]
            blocks.append([block, references, palette.setdefault(colour, len(palette)), names])
        return blocks

    steps = [
        {
            "step": s.step,
            "happened": s.happened,
            "device": listed(s.device, s.refcounts),
            "idle": s.idle,
            "host": listed(s.host, None),
        }
        for s in snapshots
    ]
    return {
        "title": title,
        "page_size": page_size,
        "num_blocks": len(snapshots[0].refcounts) - 1,
        "num_host_blocks": max((max(s.host) for s in snapshots if s.host), default=0),
        "requests": list(requests),
        "colours": [to_hex(of[name]) for name in requests],
        "palette": list(palette),
        "steps": steps,
    }


def page(data: Mapping[str, Any]) -> str:
    """The HTML template with the data inserted. The page loads no other file."""
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return TEMPLATE.read_text("utf-8").replace("/*DATA*/", text)


def row_of(snapshot: Snapshot, record: StepRecord) -> Row:
    moved = (record.preemptions, record.swapped_out, record.swapped_in, record.copied_blocks)
    return Row(
        snapshot.step, record.kv_token_states, record.kv_reserved, record.kv_internal,
        record.kv_external, record.kv_free, record.kv_shared, max(snapshot.refcounts),
        sum(len(owners) > 1 for owners in snapshot.device.values()), len(snapshot.idle),
        len(snapshot.host), *moved,
    )  # fmt: skip


def requests_of(flags: MapFlags, tokenizer) -> dict[str, tuple[list[int], SamplingParams]]:
    return make_requests(
        flags.requests, flags.prompt_tokens, flags.prefix_tokens, flags.output_tokens,
        flags.engine.seed, tokenizer,
    )  # fmt: skip


def check(flags: MapFlags) -> None:
    model, config = checkpoint.load_config(flags.model), flags.engine
    if config.policy != "vllm":
        raise ValueError(f"--policy must be vllm, not {config.policy!r}")
    sizes = policy_of(config.policy).sizes(config, ShardedModel.split(model))
    tokenizer = load_tokenizer(flags.model)
    for prompt, how in requests_of(flags, tokenizer).values():
        validated_prompt(prompt, how, tokenizer, model, config, sizes)


def measure(flags: MapFlags, run_: Run) -> Iterator[Row]:
    config = flags.engine
    engine = load_engine(config, **loading(flags))
    engine.warm_up()
    requests = requests_of(flags, engine.tokenizer)
    snapshots = run(engine, requests, flags.interval)
    title = (
        f"{len(snapshots[0].refcounts) - 1} blocks of {config.page_size} tokens, "
        f"--executor={flags.executor}"
    )
    footer = f"{flags.model}, --requests={','.join(flags.requests)}"
    figure = draw(snapshots, list(requests), title, footer)
    run_record.save_figure(figure, run_.folder / "memory_map.png", dpi=110)
    data = page_data(snapshots, list(requests), config.page_size, title)
    run_record.write_whole(run_.folder / "memory_map.html", page(data))
    yield from map(row_of, snapshots, engine.metrics.steps)


def values(_: MapFlags, rows: Sequence[Row]) -> Values:
    """Maxima over the steps of owners and blocks; sums over the steps of preemptions and moves."""
    numbers: dict[str, float] = {"steps": len(rows)}
    for name in ("most_owners", "shared_blocks", "idle_blocks", "host_blocks"):
        numbers[f"max_{name.removeprefix('most_')}"] = max(getattr(row, name) for row in rows)
    for name in ("preemptions", "swapped_out", "swapped_in", "copied_blocks"):
        key = f"{name}_blocks" if name.startswith("swapped") else name
        numbers[key] = sum(getattr(row, name) for row in rows)
    return numbers


STUDY = Study(
    __file__,
    title="Who owns which KV block in each step (vLLM Figs. 3 and 6 to 9)",
    kind="counted",
    claim="blocks of parallel samples, beams and prefixes are shared, copied when written, and "
    "swapped out and in",
    rule="each of these happens at least once, and a block has as many owners as a beam is wide",
    holds=lambda v: v["max_owners"] >= 4 and all(v.values()),
    setting=Setting(
        "six small requests in 48 blocks of 8 tokens, greedy tokens of the bundled model",
        "the paper's figures are drawings",
        "paper",
    ),
    flags=MapFlags,
    measure=measure,
    values=values,
    check=check,
    table=lambda flags, rows: f"{len(rows)} steps: memory_map.html shows each",
    quick={"executor": "simulated"},
    minutes=(0.2, 0.5),
)

if __name__ == "__main__":
    STUDY.run()
