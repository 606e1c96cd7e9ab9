"""PEFT's folders, loaded and applied, against checkpoints that hold the merged weights."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import checkpoint, lora, peft
from tests.models import peft_folders
from tests.models.goldens import ADAPTER_CASES, GOLDEN, adapter_golden, golden, run
from tests.models.peft_folders import edit, tensor
from tests.paged.tiny import TINY

LLAMA = checkpoint.load_config(GOLDEN / "llama_gqa_tied")
ATTENTION = ["q_proj", "v_proj"]
Q1 = "model.layers.1.self_attn.q_proj"
# name -> (checkpoint, differences from an adapter of rank 8 on all modules)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_gqa_tied", {}),
    "some modules": ("llama_gqa_tied", {"targets": ATTENTION, "lora_alpha": 3.5}),
    "rslora": ("qwen2", {"rank": 3, "use_rslora": True}),
    "patterns": (
        "llama_gqa_tied",
        {
            "ranks": {Q1: 20, "model.layers.0.mlp.down_proj": 2, "model.layers.1.mlp.down_proj": 2},
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 20, "down_proj": 2},
            "alpha_pattern": {"down_proj": 32, r".*\.0\..*k_proj": 1},
        },
    ),
    "opt": ("opt", {"rank": 17}),
    "bfloat16": ("opt_350m", {"dtype": ml_dtypes.bfloat16}),
    "gpt2": ("gpt2", {"fan_in_fan_out": True}),
    "gpt2 attention": ("gpt2_untied", {"targets": ["c_attn"], "lora_alpha": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_computes_what_a_merged_checkpoint_does(case, tmp_path):
    source, how = CASES[case]
    config, params, tokens, base = golden(source)
    folder = peft_folders.write(tmp_path / "adapter", config, **how)
    adapter, _ = peft.load(folder, config)
    shutil.copytree(GOLDEN / source, tmp_path / "merged")
    path = tmp_path / "merged" / "model.safetensors"
    save_file(peft_folders.merged(path, folder, config), path, metadata={"format": "pt"})
    expected, _ = run(config, checkpoint.load(tmp_path / "merged")[1], tokens)
    got, _ = run(config, lora.merge(params, adapter), tokens)
    size = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * size)
    assert np.abs(got - base).max() > 0.05 * size


def test_the_hash_is_that_of_the_content(tmp_path):
    first, again = (
        peft.load(peft_folders.write(tmp_path / name, LLAMA), LLAMA)[1] for name in "ab"
    )
    assert first == again
    other = peft.load(peft_folders.write(tmp_path / "a", LLAMA, seed=1), LLAMA)[1]
    scaled = peft.load(peft_folders.write(tmp_path / "b", LLAMA, lora_alpha=9), LLAMA)[1]
    assert len({first, other, scaled}) == 3


def test_pages_hold_all_ranks_and_zeros():
    declared = lora.declare(LLAMA)
    rng = np.random.default_rng(0)
    _, _, width = declared["wq"]["a"].shape
    _, _, fan_out = declared["wq"]["b"].shape
    pairs = [
        (rng.random((r, width), np.float32), rng.random((r, fan_out), np.float32)) for r in (20, 3)
    ]
    adapter = lora.Lora({"wq": [pairs[0], pairs[1]], "wk": [None, None]})
    assert lora.num_pages(adapter.rank) == 2
    pages = [lora.page(adapter, LLAMA, number, "float32") for number in range(2)]
    assert all(page.keys() == {"wq"} for page in pages)
    for which, key in enumerate(("a", "b")):
        together = np.concatenate([page["wq"][key] for page in pages], axis=1)
        for layer, pair in enumerate(pairs):
            ranks = len(pair[0])
            assert np.array_equal(together[layer, :ranks], pair[which])
            assert not together[layer, ranks:].any()


def without(name: str):
    return lambda folder: (folder / name).unlink()


def with_content(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def with_tensor(which: str, value: np.ndarray):
    return lambda folder: edit(folder, lambda tensors: tensors.update({tensor(Q1, which): value}))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (shutil.rmtree, "there is no folder"),
        (without(peft.CONFIG), "config.json is missing"),
        (with_content(peft.CONFIG, "["), "adapter_config.json: "),
        (with_content(peft.CONFIG, "{}"), "peft_type None is not supported"),
        (without(peft.WEIGHTS), "safetensors is missing"),
        (with_content(peft.WEIGHTS, "x"), "is damaged"),
        (with_tensor("B", np.full((32, 8), np.inf)), "q_proj B has values that are NaN or infin"),
        (with_tensor("A", np.zeros((8, 24), np.int32)), "has dtype I32"),
        (with_tensor("magnitude", np.zeros(1)), "lora_magnitude.weight belongs to no module"),
    ],
)
def test_a_broken_folder_is_refused(spoil, error, tmp_path):
    folder = peft_folders.write(tmp_path / "adapter", LLAMA)
    spoil(folder)
    with pytest.raises(ValueError, match=error):
        peft.load(folder, LLAMA)


def unreadable(folder: Path) -> Path:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/proc/self/mem")
    return folder


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (unreadable, "adapter_model.safetensors cannot be read: Input/output error"),
        (lambda folder: folder / ("x" * 5_000), "File name too long"),
        (lambda folder: None, "an adapter's folder must be a path, not None"),
        (lambda folder: 5, "an adapter's folder must be a path, not 5"),
        (lambda folder: str(folder) + "\0", "there is no folder|null byte"),
    ],
)
def test_what_is_no_folder_is_refused(given, error, tmp_path):
    folder = given(peft_folders.write(tmp_path / "adapter", LLAMA))
    with pytest.raises(ValueError, match=error) as raised:
        peft.load(folder, LLAMA)
    assert len(str(raised.value)) < 1_000


def test_values_beyond_the_dtype_that_serves_are_refused(tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, targets=["q_proj"], lora_alpha=1e6, size=10)
    for dtype in ("float32", "bfloat16"):
        peft.load(folder, LLAMA, dtype)
    with pytest.raises(ValueError, match=r"q_proj scaled B has values of up to .* beyond float16"):
        peft.load(folder, LLAMA, "float16")


def test_a_scale_that_leaves_float32_is_refused(tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA, lora_alpha=1e38, size=1e3)
    with pytest.raises(ValueError, match="scaled B has values that are NaN or infinite"):
        peft.load(folder, LLAMA)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder = peft_folders.write(tmp_path, LLAMA.replace(hidden_size=48), targets=ATTENTION)
    with pytest.raises(ValueError, match=r"the model and adapter_config.json .* need"):
        peft.load(folder, LLAMA)
    with pytest.raises(ValueError, match="no projection of a layer; allowed: c_attn, c_fc, c_proj"):
        peft.load(folder, checkpoint.load_config(GOLDEN / "gpt2"))


def test_merging_keeps_the_dtype():
    config, params, _, _ = golden("llama_gqa_tied")
    half = {"layers": [{"wq": layer["wq"].astype(jnp.bfloat16)} for layer in params["layers"]]}
    fan_out, width = half["layers"][0]["wq"].shape
    pair = np.ones((1, width), np.float32), np.ones((1, fan_out), np.float32)
    merged = lora.merge(half, lora.Lora({"wq": [pair] * config.num_layers}))
    assert merged["layers"][0]["wq"].dtype == jnp.bfloat16


WRITTEN_MEANWHILE = """
import sys, threading
from pathlib import Path
from models import peft
from tests.paged.tiny import TINY
folder = Path(sys.argv[1])
path, ended = folder / "adapter_model.safetensors", threading.Event()
whole, content = path.read_bytes(), peft.load(folder, TINY)[1]
def write():
    while not ended.is_set():
        path.write_bytes(whole[: len(whole) // 2])
        path.write_bytes(whole)
        ended.wait(1e-3)
threading.Thread(target=write).start()
came = 0
for _ in range(600):
    try:
        assert peft.load(folder, TINY)[1] == content
        came += 1
    except ValueError:
        pass
ended.set()
print(came)
"""


@pytest.mark.slow
def test_who_writes_an_adapter_anew_ends_no_process_that_reads_it(tmp_path):
    folder = peft_folders.write(tmp_path / "a", TINY, 64)
    done = subprocess.run(
        [sys.executable, "-c", WRITTEN_MEANWHILE, str(folder)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize("case", ADAPTER_CASES)
def test_logits_are_those_of_peft(case):
    expected = adapter_golden(case)
    config, params, _, _ = golden(expected.checkpoint)
    adapter, _ = peft.load(expected.folder, config)
    got, _ = run(config, lora.merge(params, adapter), expected.tokens)
    np.testing.assert_allclose(got, expected.logits, rtol=0, atol=1e-4)
    unlike, _ = run(config, params, expected.tokens)
    assert np.abs(unlike - expected.logits).max() > 0.5


@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize(
    ("source", "targets"), [("llama_gqa_tied", None), ("llama_gqa_tied", ATTENTION), ("gpt2", None)]
)
def test_what_is_saved_loads_again(source, targets, layers, tmp_path):
    config = checkpoint.load_config(GOLDEN / source)
    written = peft_folders.write(tmp_path / "a", config, targets=targets, lora_alpha=3)
    adapter, _ = peft.load(written, config)
    if layers:
        kept = {name: [None, pairs[1]] for name, pairs in adapter.weights.items()}
        adapter = lora.Lora(kept)
    peft.save(tmp_path / "b", adapter, config, "float32")
    again, _ = peft.load(tmp_path / "b", config)
    assert again.weights.keys() == adapter.weights.keys()
    for name, pairs in adapter.weights.items():
        for before, after in zip(pairs, again.weights[name], strict=True):
            assert (before is None) == (after is None)
            for x, y in zip(before or (), after or ()):
                np.testing.assert_array_equal(x, y)


def test_what_cannot_be_saved_is_refused(tmp_path):
    ranks = {Q1: 3}
    written = peft_folders.write(tmp_path / "a", LLAMA, ranks=ranks, rank_pattern=ranks)
    with pytest.raises(ValueError, match="q_proj has rank 3, but another module has rank 8"):
        peft.save(tmp_path / "b", peft.load(written, LLAMA)[0], LLAMA)
    gpt2 = checkpoint.load_config(GOLDEN / "gpt2")
    fused = peft.load(peft_folders.write(tmp_path / "c", gpt2), gpt2)[0].weights
    doubled: list[lora.Pair | None] = [(2 * pair[0], pair[1]) for pair in fused["wk"] if pair]
    for other in ({"wq": fused["wq"]}, {**fused, "wk": doubled}):
        with pytest.raises(ValueError, match="c_attn holds several projections, which do not all"):
            peft.save(tmp_path / "d", lora.Lora(other), gpt2)
