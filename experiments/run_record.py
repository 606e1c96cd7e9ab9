"""Writing down what an experiment did: the same files for every experiment.

report.json holds everything about the run: flags, versions, hardware, measurements.
summary.json is one flat object, name -> number, to compare runs by.
"""

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Package versions, hardware and the commit of this checkout, as far as they can be told."""
    installed = {d.name.lower() for d in importlib.metadata.distributions() if d.name}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {
            "cpu": _cpu_model(),
            "cpu_cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "memory_gib": _memory_gib(),
            "system": f"{platform.system()} {platform.machine()}",
            "jax_backend": jax.default_backend(),
            "jax_devices": [device.device_kind for device in jax.devices()],
        },
        "git_commit": _git_commit(),
    }


def hardware_line(environment: Mapping[str, Any]) -> str:
    """One line that names the hardware, for tables and plot footers."""
    hardware = environment["hardware"]
    cpu = f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    if hardware["jax_backend"] == "cpu":
        return cpu
    devices = hardware["jax_devices"]
    return f"{len(devices)} × {devices[0]}; {cpu}"


def check_output_dir(output_dir: str | Path) -> Path:
    """The folder, made if it was not there; ValueError, before any work, if it takes no files."""
    path = Path(output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--output_dir={output_dir} cannot be written to: {error}") from None
    return path


def write_summary(output_dir: str | Path, numbers: Mapping[str, float | int]) -> Path:
    """Write summary.json.

    Raises: ValueError for a value that is not a finite number; leave out what was not measured.
    """
    for name, value in numbers.items():
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"summary.json holds finite numbers only, not {name}={value!r}")
    return write_json(output_dir, "summary.json", numbers)


def write_json(output_dir: str | Path, name: str, value: Any) -> Path:
    """Write `plain(value)` to a JSON file; its path."""
    return _write(output_dir, name, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def write_json_lines(output_dir: str | Path, name: str, values: Iterable[Any]) -> Path:
    """Write one JSON value a line; the path of the file."""
    lines = (json.dumps(plain(value), ensure_ascii=False) + "\n" for value in values)
    return _write(output_dir, name, "".join(lines))


def write_csv(output_dir: str | Path, name: str, rows: Sequence[Any]) -> Path:
    """Write dataclass instances of one kind, a line each; the path of the file."""
    path = Path(output_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(rows[0])])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)
    return path


def _write(output_dir: str | Path, name: str, text: str) -> Path:
    path = Path(output_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses as objects, arrays and tuples as lists, numpy scalars as
    numbers, nan and inf as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if tracked files differ from it."""
    here = str(Path(__file__).parent)
    git = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
