"""The fit, on times that the cost model itself computed, and the files that the fit refuses."""

import csv
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from experiments import fit_cost_model
from experiments.fit_cost_model import FitFlags
from experiments.lib import layer_times
from experiments.lib.typed_flags import Output
from models import checkpoint
from paged.kv_cache.policy import ShardedModel
from paged.simulator.cost_model import FITTED
from paged.simulator.layer import layer_ops
from paged.simulator.machines import MACHINES

TOKENS = (1, 4, 24, 100, 300, 1000, 4000)


def write_times(folder, gpu: str, by=FITTED, noise: float = 0.0, called="llama2-7b-a100"):
    rng, rows = np.random.default_rng(0), []
    for shards in (1, 4):
        model = checkpoint.load_config("configs/models/llama-2-7b")
        ops = layer_ops(ShardedModel.split(model, shards), np.array(TOKENS))
        for i, tokens in enumerate(TOKENS):
            times = {
                f"{name}_ms": 1e3 * float(ops[ours].seconds(MACHINES[gpu], by)[i])
                for name, ours in layer_times.OPS.items()
            }
            noisy = {name: s * float(np.exp(noise * rng.normal())) for name, s in times.items()}
            rows.append({"num_tokens": tokens, "tensor_parallel": shards, "emb_ms": 1.0, **noisy})
    path = folder / f"{called}-layer-times.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_committed_constants_reproduce_what_they_made(tmp_path):
    write_times(tmp_path, "a100-80")
    measured, _ = layer_times.read(tmp_path, "a100-80")
    assert sum(len(times.tokens) for times in measured) == 2 * len(TOKENS)
    numbers = fit_cost_model.summary(measured, MACHINES["a100-80"], FITTED)
    assert max(numbers["layer_error"], numbers["product_error"]) < 1e-9
    assert numbers["pointwise_error"] < 1e-9
    assert numbers["roofline_layer_error"] > 0.1
    assert numbers["roofline_over_measured"] < 1


@pytest.mark.slow
def test_the_fit_finds_other_constants(tmp_path):
    true = replace(FITTED, memory=0.7, compute=0.6, rows=0.4, start_s=8e-6)
    write_times(tmp_path, "h100", true, noise=0.02, called="llama-2-7b-h100")
    measured, _ = layer_times.read(tmp_path, "h100")
    on = MACHINES["h100"]
    assert fit_cost_model.summary(measured, on, FITTED)["layer_error"] > 0.1
    found = fit_cost_model.fit(measured, on)
    assert fit_cost_model.summary(measured, on, found)["layer_error"] < 0.02
    assert found.memory == pytest.approx(0.7, rel=0.05)
    assert found.start_s == pytest.approx(8e-6, rel=0.1)


def test_fixed_constants_stay_and_their_error_is_written(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    write_times(data, "l40s", noise=0.05, called="llama2-7b-l40s")
    out.mkdir()
    fit_cost_model.main(FitFlags(str(data), "l40s", fixed=True), Output(str(out)))
    summary = json.loads((out / "summary.json").read_text())
    assert 0.005 < summary["layer_error"] < 0.08
    assert summary["constant_compute"] == FITTED.compute
    assert json.loads((out / "report.json").read_text())["constants"] == asdict(FITTED)
    assert (out / "cost_model.png").stat().st_size > 10_000
    assert "roofline's layer" in capsys.readouterr().out


def test_files_in_other_orders_spellings_and_of_unknown_models(tmp_path, capsys):
    """Columns in any order, more columns than are needed, and a model without a configuration."""
    path = write_times(tmp_path, "a40", called="Llama-2-7b-a40")
    header, *lines = [line.split(",") for line in path.read_text().splitlines()]
    text = "\n".join(", ".join(reversed([*line, "0"])) for line in [header, *lines])
    path.write_text(text.replace("0, add_ms", "more, add_ms") + "\n\n")
    write_times(tmp_path, "a40", called="codellama-34b-a40")
    fit_cost_model.main(FitFlags(str(tmp_path), "a40", fixed=True), Output(str(tmp_path)))
    assert json.loads((tmp_path / "summary.json").read_text())["layer_error"] < 1e-9
    assert "left out, as no configuration is known: codellama-34b-a40" in capsys.readouterr().out


def test_a_model_without_rotations_needs_no_times_of_them(tmp_path):
    text = write_times(tmp_path, "h100").read_text()
    (tmp_path / "opt-13b-h100-layer-times.csv").write_text(text.replace("attn_rope_ms", "more"))
    measured, _ = layer_times.read(tmp_path, "h100")
    assert {times.model for times in measured} == {"opt-13b"}
    assert all("rope" not in times.seconds for times in measured)


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="--data must name a folder"):
        layer_times.read("", "a100-80")
    with pytest.raises(ValueError, match=r"has no MODEL-a100-80-layer-times\.csv; .* there: none"):
        layer_times.read(tmp_path, "a100-80")
    path = write_times(tmp_path, "a100-80", called="gpt5-a100")
    with pytest.raises(ValueError, match=r"gpt5-a100-.*: no model among llama-13b"):
        layer_times.read(tmp_path, "a100-80")
    path.unlink()
    path = write_times(tmp_path, "a100-80")
    text = path.read_text()
    path.write_text(text.replace("attn_rope_ms", "rope"))
    with pytest.raises(ValueError, match="lacks the columns attn_rope_ms"):
        layer_times.read(tmp_path, "a100-80")
    lines = text.splitlines()
    lines[2] = lines[2].replace(lines[2].split(",")[3], "nan", 1)
    path.write_text("\n".join(lines))
    told = r"line 3: input_layernorm_ms must be above 0 and below 2\^31, not 'nan'"
    with pytest.raises(ValueError, match=told):
        layer_times.read(tmp_path, "a100-80")
    for odd in (text.encode("utf-16"), (text + "9" * 200_000).encode()):
        path.write_bytes(odd)
        with pytest.raises(ValueError, match=r"times\.csv is no CSV in UTF-8: "):
            layer_times.read(tmp_path, "a100-80")
    path.write_text(text.splitlines()[0])
    with pytest.raises(ValueError, match="has no rows"):
        layer_times.read(tmp_path, "a100-80")
