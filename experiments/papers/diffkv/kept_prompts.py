"""Prompts of DiffKV that several systems share: their keys and values are kept in files.

Attention of a prompt is exact under DiffKV's policy (§4). So but for rounding a prompt's keys and
values depend on the model alone, and its sums of probabilities on the policy's prompt scores, not
on thresholds or formats. `keep_prompts` gives an engine an executor that computes them once for
each kind of scores, and compresses them for each system. On a CPU most of a study's time is spent
on prompts.

Two files hold a prompt: FILE.npz its keys, values and last hidden state, FILE_SCORES.npz its sums.
Systems with other prompt scores share the first file, which saves disk, not time. File names depend
on the model, its code (SOURCES) and the device; files of other code stay until they are deleted.
"""

import functools
import hashlib
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import kept_answers, run_record
from models.config import ModelConfig
from models.families import family
from models.sampling import Array
from paged.config import EngineConfig
from paged.device.executor import DeviceExecutor, PendingOutputs
from paged.device.step import GPU_OPTIONS, StepOutputs, StepProgram, sample_tokens, tokens_of
from paged.engine import Engine
from paged.kv_cache.diffkv.device import DiffKVDevice
from paged.kv_cache.diffkv.stage import Places
from paged.kv_cache.windows import window_of
from paged.step_inputs import StepInputs, step_layout, unpack

SPARE_BYTES = 8 * 10**9
Paths = tuple[Path, Path]  # of keys and values, and of sums
NAMES = {"keys", "values", "hidden"}, {"sums"}  # of the arrays of each
SOURCES = "pallas_kernels", "models", "paged", "experiments/papers/diffkv/kept_prompts.py"


@flax.struct.dataclass
class Prompt:
    """A whole prompt, padded to T tokens.

    keys, values: [L, T, K, D] in the model's dtype.
    sums: [L, T, K] float32, sums of probabilities as `Keeper.of_prompts` takes them.
    hidden: [W] hidden state of the last token.
    """

    keys: Array
    values: Array
    sums: Array
    hidden: Array


def prefill(params, inputs: StepInputs, model: ModelConfig, policy: DiffKVDevice) -> Prompt:
    """The one prompt of a step."""
    T, K, D = inputs.num_prefill_tokens, model.num_kv_heads, model.head_dim
    schedule = policy.schedule(inputs)

    def attend(layer, q_TxHxD, k_TxKxD, v_TxKxD, kept):
        window = window_of(policy.attention, layer)
        out, sums = policy.attend_prompts(
            q_TxHxD, k_TxKxD, v_TxKxD, inputs.query_starts, window, schedule
        )
        new = k_TxKxD, v_TxKxD, sums
        kept = jax.tree.map(lambda x, of_layer: x.at[layer].set(of_layer), kept, new)
        return out.astype(q_TxHxD.dtype), kept

    keys = jnp.zeros((model.num_layers, T, K, D), params["embed"].dtype)
    kept = keys, jnp.zeros_like(keys), jnp.zeros(keys.shape[:-1], jnp.float32)
    hidden, (keys, values, sums) = family(model).forward(
        params, model, inputs.tokens[:T], inputs.positions[:T], attend, kept
    )
    return Prompt(keys, values, sums, hidden[inputs.last_tokens[0]])


def step(
    params, cache, state, inputs: StepInputs, prompt: Prompt, model: ModelConfig,
    policy: DiffKVDevice,
):  # fmt: skip
    """`paged.device.step.step` of a step whose one prompt is `prompt`."""
    T, places = inputs.num_prefill_tokens, Places.of_step(inputs)
    cache, plan = policy.begin_step(cache, inputs)
    prompts, decodes = plan.prompts, plan.decodes
    assert prompts is not None and decodes is not None

    def attend(layer, q_SxHxD, k_SxKxD, v_SxKxD, cache):
        of_layer = prompt.keys[layer], prompt.values[layer], prompt.sums[layer]
        cache = policy.compress(layer, *of_layer, cache, prompts, places)
        window = window_of(policy.attention, layer)
        out, cache = policy.decode(layer, q_SxHxD, k_SxKxD, v_SxKxD, cache, decodes, window)
        return out.astype(q_SxHxD.dtype), cache

    tokens = tokens_of(state, inputs)[T:]
    hidden, cache = family(model).forward(
        params, model, tokens, inputs.positions[T:], attend, cache
    )
    cache = policy.end_step(cache, plan, inputs)
    of_prompts = jnp.zeros((T, hidden.shape[1]), hidden.dtype)
    hidden = jnp.concatenate([of_prompts.at[inputs.last_tokens[0]].set(prompt.hidden), hidden])
    state, sampled, logprobs = sample_tokens(params, state, inputs, model, hidden)
    return cache, state, jax.tree.map(lambda x: x[None], StepOutputs(sampled, logprobs))


@functools.lru_cache(maxsize=8)
def programs(program: StepProgram, shape: tuple[int, int]) -> tuple[Any, Any]:
    """`prefill` and `step`, jitted for steps of this shape."""
    layout = step_layout(*shape, program.prefill_rows, program.table_width)
    model, policy = program.shards.model, program.policy
    assert isinstance(policy, DiffKVDevice)

    def of_prompt(params, packed):
        return prefill(params, unpack(packed, layout), model, policy)

    def of_step(params, _, cache, state, packed, prompt):
        inputs = unpack(packed, layout)
        cache, state, outputs = step(params, cache, state, inputs, prompt, model, policy)
        report = jax.tree.map(lambda x: x[None], policy.report(cache))
        return cache, state, outputs.replace(report=report)

    options = GPU_OPTIONS if program.shards.platform == "gpu" else None
    return (
        jax.jit(of_prompt, compiler_options=options),
        jax.jit(of_step, donate_argnums=(2, 3), compiler_options=options),
    )


class KeptPrompts:
    """Wraps a `DeviceExecutor`; its prompts are kept in a folder.

    made_by: `kept_answers.made_by`.
    """

    def __init__(self, executor: DeviceExecutor, folder: Path, made_by: Mapping[str, Any]):
        self._executor, self._folder = executor, folder
        policy = executor.program.policy
        assert isinstance(policy, DiffKVDevice)
        made_by = {**made_by, "sources": kept_answers.loaded_sources(SOURCES)}
        how = executor.dtype, policy.layout.prompt_tile, policy.implementation, made_by
        self._made_by = json.dumps(run_record.plain(how))
        self._scores_digest = _digest(json.dumps(policy.rules.prompt_scores))[:8]
        self._keeps = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, inputs: StepInputs) -> PendingOutputs:
        T = inputs.num_prefill_tokens
        if not T or np.any(inputs.prompt_targets >= 0):  # log-probabilities need all hidden states
            return self._executor.execute(inputs)
        of_prompt, of_step = programs(self._executor.program, (T, len(inputs.tokens) - T))
        start, end = inputs.query_starts[:2]
        assert start == 0 and inputs.num_prefill_rows == 1 and inputs.positions[0] == 0
        name = _digest(f"{self._made_by} {T} {inputs.tokens[:end].tolist()}")
        paths = self._folder / f"{name}.npz", self._folder / f"{name}_{self._scores_digest}.npz"
        prompt = read(paths, T, self._executor.dtype)
        if prompt is None:
            prompt = of_prompt(self._executor.params, inputs.packed)
            self._keep(paths, prompt, int(end))
        return self._executor.run(of_step, inputs, prompt)

    def _keep(self, paths: Paths, prompt: Prompt, length: int) -> None:
        """Write the prompt if the disk has room for other files, too; else write no more."""
        try:
            if self._keeps:
                self._folder.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(self._folder).free < SPARE_BYTES:
                    raise OSError(f"less than {SPARE_BYTES // 10**9} GB are free")
                write(paths, prompt, length)
        except OSError as error:
            self._keeps = False
            print(f"Prompts are not kept from here on, but computed again: {error}", flush=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def can_keep(config: EngineConfig) -> bool:
    """Whether an engine's prompts can be kept: each is the one whole prompt of a step, on one
    device, without adapters and quantised weights."""
    return (
        config.policy == "diffkv" and not config.chunked_prefill
        and config.max_prefills_per_step == config.tensor_parallel == 1
        and config.adapter_slots == 0 and config.quantization == "none"
    )  # fmt: skip


def keep_prompts(engine: Engine, folder: Path, made_by: Mapping[str, Any]) -> Engine:
    """`engine`, with its prompts kept in a folder if `can_keep`."""
    if can_keep(engine.config):
        assert isinstance(engine.executor, DeviceExecutor)
        kept: Any = KeptPrompts(engine.executor, folder, made_by)
        engine.executor = engine.loop.executor = kept
    return engine


def write(paths: Paths, prompt: Prompt, length: int) -> None:
    """Write the prompt's `length` tokens without padding. An undamaged file of keys and values
    stays."""
    of_keys, of_sums = paths
    if not _arrays(of_keys, NAMES[0]):
        keys, values = (np.asarray(x)[:, :length] for x in (prompt.keys, prompt.values))
        _write(of_keys, keys=keys, values=values, hidden=np.asarray(prompt.hidden))
    _write(of_sums, sums=np.asarray(prompt.sums)[:, :length])


def _write(path: Path, **arrays: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    run_record.write_whole(path, content.getvalue())


def read(paths: Paths, T: int, dtype: str) -> Prompt | None:
    """The prompt that `write` wrote, padded to T tokens; None if a file is missing or damaged.
    dtype: the model's; .npz files lose the name of bfloat16."""
    found = [_arrays(path, names) for path, names in zip(paths, NAMES)]
    if not all(found):
        return None
    arrays = {name: x for each in found for name, x in each.items()}
    for name, x in arrays.items():
        if x.dtype.kind == "V":
            arrays[name] = x = x.view(jnp.dtype(dtype))
        if name != "hidden":
            arrays[name] = np.pad(x, [(0, 0), (0, T - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return Prompt(**arrays)


def _arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz; none if it is missing or damaged, or has arrays of other names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile,
        zlib.error,
    ):  # fmt: skip
        return {}
    return found if found.keys() == names else {}
