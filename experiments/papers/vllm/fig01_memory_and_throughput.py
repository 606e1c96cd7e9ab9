"""Memory of an A100, and the batches that it allows (vLLM Fig. 1): counted, and in simulated time.

    python -m experiments.papers.vllm.fig01_memory_and_throughput

The left panel shows the shares of OPT-13B's weights and of the KV cache in 40 GB. The right panels
show KV memory in use and throughput over the batch, as the request rate rises. The existing system
is Orca (Max), which reserves as many slots for each request as the longest sequence has. vLLM
allocates blocks as sequences grow.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.lib import knobs
from experiments.lib.typed_flags import flag
from experiments.papers.vllm import opt, table1_kv_slots
from experiments.papers.vllm.opt import SERVERS, Case
from experiments.papers.vllm.rates import Changed, RateFlags, changed
from experiments.study import Run, Setting, Study, Values

EXISTING = "orca_max"
RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)  # requests/s of ShareGPT
MEMORY_GB = 40
FULL = 0.85  # least share of the KV memory that the existing system uses


@dataclass(frozen=True)
class MemoryFlags(RateFlags):
    duration_s: float = flag(900.0, "seconds of arrivals", least=1)


def measure(flags: MemoryFlags, run: Run) -> Iterator[Changed]:
    cases: list[tuple[str, Case]] = []
    for policy in (EXISTING, "vllm"):
        for rate in RATES:
            case = Case(
                "13b", "sharegpt", policy, rate, flags.sigma_of("sharegpt"), flags.duration_s,
                flags.seed, flags.host,
            )  # fmt: skip
            cases.append(("", case))
            cases += knobs.varied(case, flags.knobs and rate == RATES[-1]).items()
    yield from changed(run, opt.run, cases, flags.jobs)


def run_values(points: Sequence[Changed]) -> Values:
    """Numbers at the highest rate: most_batch_SYSTEM, most_tokens_per_s_SYSTEM, kv_used_SYSTEM, and
    the ratios batch_vllm_over_existing and tokens_per_s_vllm_over_existing."""
    numbers: dict[str, float | None] = {}
    for policy in (EXISTING, "vllm"):
        last = max((p for p in points if p.policy == policy), key=lambda p: p.rate)
        numbers |= {
            f"most_batch_{policy}": last.batch,
            f"most_tokens_per_s_{policy}": last.tokens_per_s,
            f"kv_used_{policy}": last.kv_used,
        }
    for name in ("batch", "tokens_per_s"):
        existing, paged = (numbers[f"most_{name}_{policy}"] for policy in (EXISTING, "vllm"))
        assert existing and paged
        numbers[f"{name}_vllm_over_existing"] = paged / existing
    return numbers


def values(flags: MemoryFlags, points: Sequence[Changed]) -> Values:
    """`run_values`, also with changed constants, and three shares.

    weights_share, kv_share: shares of weights and of the KV cache in the GPU's memory.
    kv_used_at_batch: share of KV memory that vLLM uses at the existing system's largest batch.
    """
    found = knobs.values(points, run_values, holds)
    counted = table1_kv_slots.row_of("13b", SERVERS["13b"])
    paged = sorted((p.batch, p.kv_used) for p in points if p.policy == "vllm" and not p.change)
    most = found[f"most_batch_{EXISTING}"]
    assert most is not None
    batches, used = zip(*paged)
    return {
        "weights_share": counted.weights_gb / MEMORY_GB,
        "kv_share": counted.kv_gib / counted.memory_gib,
        "kv_used_at_batch": opt.crossing(used, batches, most),
        **found,
    }


def holds(found: Mapping[str, float]) -> bool:
    more = found["tokens_per_s_vllm_over_existing"] > 2 and found["batch_vllm_over_existing"] > 2
    return more and found[f"kv_used_{EXISTING}"] >= FULL


def draw(_: MemoryFlags, figure: Figure, points: Sequence[Changed]) -> None:
    counted = table1_kv_slots.row_of("13b", SERVERS["13b"])
    pie, memory, throughput = figure.subplots(1, 3)
    shares = [counted.weights_gb / MEMORY_GB, counted.kv_gib / counted.memory_gib]
    pie.pie([*shares, 1 - sum(shares)], labels=["weights", "KV cache", "others"],
            autopct="%.0f %%")  # fmt: skip
    for policy in (EXISTING, "vllm"):
        mine = [p for p in points if p.policy == policy and not p.change]
        batches = [p.batch for p in mine]
        held = [p.kv_used * counted.kv_gib for p in mine]
        memory.plot(batches, held, "o-", label=policy)
        throughput.plot(batches, [p.tokens_per_s for p in mine], "o-", label=policy)
    memory.set(xlabel="requests that run", ylabel="KV memory in use, GiB", ylim=(0, None))
    throughput.set(xlabel="requests that run", ylabel="output tokens/s", ylim=(0, None))
    memory.legend(frameon=False, fontsize="small")


STUDY = Study(
    __file__,
    title="Memory of an A100, and the batches that it allows (vLLM Fig. 1)",
    kind="simulated",
    claim="65 % of the memory are weights and over 30 % are keys and values; existing systems fill "
    "them with few requests, where their throughput ends, and vLLM's goes on",
    rule="at the highest rate Orca (Max) has reserved 0.85 of the KV memory, and vLLM has twice "
    "its batch and twice its throughput",
    holds=holds,
    setting=Setting(
        f"{opt.setting('13b', 'vllm')}; ShareGPT's at {RATES[0]:g} to {RATES[-1]:g} requests/s, a "
        "quarter of an hour of arrivals",
        "the paper names neither its existing system nor its lengths, nor for how long requests "
        "come; ours are Orca (Max) and ShareGPT's means",
        "paper",
    ),
    flags=MemoryFlags,
    measure=measure,
    values=values,
    paper={"weights_share": 0.65, "kv_share": (0.3, 0.35)},
    draw=draw,
    quick={"duration_s": 120.0, "knobs": False},
    minutes=(0.5, 3),
    size=(10, 3.4),
)

if __name__ == "__main__":
    STUDY.run()
