"""Records of a run, in the same files for every experiment.

report.json holds everything about the run: flags, versions, hardware, measurements.
summary.json is one flat object, name -> number, to compare runs.
"""

import csv
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Package versions, hardware and the commit of this checkout; None where unknown."""
    installed = {d.name.lower() for d in importlib.metadata.distributions() if d.name}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {
            "cpu": _cpu_model(),
            "cpu_cores": cpu_cores(),
            "memory_gib": memory_gib(),
            "system": f"{platform.system()} {platform.machine()}",
            "jax_backend": jax.default_backend(),
            "jax_devices": [device.device_kind for device in jax.devices()],
        },
        "git_commit": _git_commit(),
    }


def cpu_cores() -> int:
    """The number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def hardware_line(environment: Mapping[str, Any]) -> str:
    """One line that names the hardware, for tables and plot footers."""
    hardware = environment["hardware"]
    cpu = f"{hardware['cpu']}, {hardware['cpu_cores']} cores"
    if hardware["jax_backend"] == "cpu":
        return cpu
    devices = hardware["jax_devices"]
    return f"{len(devices)} × {devices[0]}; {cpu}"


def check_output_dir(output_dir: str | Path, *names: str) -> Path:
    """The output folder, made if missing. Raises ValueError if it is not writable, or if
    report.json, summary.json or one of `names` is a folder there."""
    if not str(output_dir):
        raise ValueError("--output_dir must name a folder, not ''")
    path = Path(output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))  # on a full disk an empty file can still be created
    except OSError as error:
        raise ValueError(f"--output_dir={output_dir} cannot be written to: {error}") from None
    for name in ("report.json", "summary.json", *names):
        if (path / name).is_dir():
            raise ValueError(
                f"--output_dir={output_dir} cannot be written to: {name} is a folder there"
            )
    return path


def other_flags(output_dir: str | Path, flags: Any, study: str = "") -> str:
    """A message that names the differences of the folder's report.json from `flags` and `study`;
    empty without a report, or without a difference. An invalid report gives a message too."""
    path = Path(output_dir) / "report.json"
    if not path.is_file():
        return ""
    try:
        report = json.loads(path.read_bytes())
        if study and report["study"] != study:
            return f"it is of {report['study']}"
        before, now = flat(report["flags"]), flat(plain(flags))
        names = sorted(before.keys() | now.keys())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its report.json cannot be read"
    absent = "absent"
    differ = [
        f"--{name} was {before.get(name, absent)!r} and is {now.get(name, absent)!r}"
        for name in names
        if before.get(name, absent) != now.get(name, absent)
    ]
    return "; ".join(differ[:3]) + "; …" * (len(differ) > 3)


def flat(flags: Mapping[str, Any]) -> dict[str, Any]:
    """All flags by name; the flags of nested parts are on the same level."""
    parts = [value for value in flags.values() if isinstance(value, Mapping)]
    return {name: x for each in (*parts, flags) for name, x in each.items() if x not in parts}


def write_summary(output_dir: str | Path, numbers: Mapping[str, float | int]) -> Path:
    """Write summary.json.

    Raises ValueError for a value that is not a finite number; leave unmeasured values out.
    """
    for name, value in numbers.items():
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"summary.json holds finite numbers only, not {name}={value!r}")
    return write_json(output_dir, "summary.json", numbers)


def write_json(output_dir: str | Path, name: str, value: Any) -> Path:
    """Write `plain(value)` to a JSON file; returns the path of the file."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"
    return write_whole(Path(output_dir) / name, text)


def write_json_lines(output_dir: str | Path, name: str, values: Iterable[Any]) -> Path:
    """Write each value as a line of JSON; returns the path of the file."""
    lines = (json.dumps(plain(value), ensure_ascii=False) + "\n" for value in values)
    return write_whole(Path(output_dir) / name, "".join(lines))


def write_csv(output_dir: str | Path, name: str, rows: Sequence[Any]) -> Path:
    """Write a line for each row; returns the path of the file.

    rows: instances of one dataclass, or dicts with equal keys.
    """
    table = [row if isinstance(row, Mapping) else dataclasses.asdict(row) for row in rows]
    text = io.StringIO(newline="")
    if table:
        writer = csv.DictWriter(text, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return write_whole(Path(output_dir) / name, text.getvalue())


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure. width, height: inches."""
    # Imported here, because the import takes a second: programs that refuse a flag end earlier.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: str | Path, dpi: int) -> Path:
    """Write a figure as PNG; returns the path of the file."""
    png = io.BytesIO()
    figure.savefig(png, dpi=dpi, format="png")
    return write_whole(path, png.getvalue())


def is_complete(folder: Path) -> bool:
    """Whether the folder has the report of a run that measured all rows."""
    try:
        return json.loads((folder / "report.json").read_bytes())["partial"] is None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file atomically: an older file stays until the new one is complete. Returns the path.

    A lone surrogate, which UTF-8 cannot encode, is written as its JSON escape. Raises OSError that
    names the file.
    """
    path = Path(path)
    # Replace the file that a link points to, not the link.
    target = Path(os.path.realpath(path))
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a device or a pipe must not be replaced
            target.write_bytes(content)
            return path
        try:
            temporary.write_bytes(content)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def write_all(writers: Iterable[Callable[[], Any]]) -> list[OSError]:
    """Call every writer, also after one has failed; returns the OSErrors."""
    errors = []
    for write in writers:
        try:
            write()
        except OSError as error:
            errors.append(error)
    return errors


def plain(value: Any) -> Any:
    """`value` as JSON values: dataclasses as objects, arrays and tuples as lists, numpy scalars as
    numbers, nan and inf as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.floating):
        value = float(value)
    if isinstance(value, np.ndarray | np.integer | np.bool_):
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


def memory_gib() -> float | None:
    """GiB of this machine's memory; None if unknown."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if tracked files are changed; None if unknown."""

    def told(*command: str) -> str:
        # `git describe --dirty` would write the index, and leave it locked on a full disk.
        git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *command]
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        changed = told("status", "--porcelain", "--untracked-files=no")
        return told("describe", "--always", "--abbrev=40") + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
