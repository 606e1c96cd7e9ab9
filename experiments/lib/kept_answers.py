"""Answers of the systems of studies, kept in a folder for later runs and other studies.

The answers of a setting (a task at a context) depend on the system, the prompts, the model's files,
the sources, the package versions and the device. Two files in `answered/` hold a setting: the
answers as JSON, the distributions as .npz. File names end in a hash of all that the answers depend
on. So several studies may run in one folder at the same time, and share the answers of equal
systems to equal prompts.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.lib import reference, run_record, shipped
from experiments.lib.answers import Answer, Evaluation
from experiments.lib.kv_held import Held
from experiments.lib.sources import code_hash
from models import checkpoint
from models.hub import TOKENIZER_FILES, find
from paged.kv_cache import POLICIES

# The sources that make prompts, generate answers and score them.
SOURCES = (
    "pallas_kernels", "models", "paged", "experiments/tasks", "experiments/evaluate.py",
    "experiments/lib/engines.py", "experiments/lib/kv_held.py",
    "experiments/lib/presets.py", "experiments/lib/reference.py", "experiments/lib/report.py",
    "experiments/papers/*/kept_prompts.py",
)  # fmt: skip


def sources_hash(root: Path = shipped.ROOT, names: Sequence[str] = SOURCES) -> str:
    """SHA-256, in hex, of the code in these files and folders (patterns) of a checkout or
    installation."""
    chosen = [path for name in names for path in root.glob(name)]
    found = {path for each in chosen for path in (each, *each.rglob("*.py")) if path.is_file()}
    return code_hash(found)


@functools.cache
def loaded_sources(names: Sequence[str] = SOURCES) -> str:
    """`sources_hash` once a process, because a process runs the sources that it has loaded, even if
    they change."""
    return sources_hash(names=names)


def made_by(model: str) -> dict[str, Any]:
    """Hashes, versions and the device, on which answers depend beside flags and prompts."""
    names = (
        "config.json", "generation_config.json", "tokenizer_config.json", *TOKENIZER_FILES
    )  # fmt: skip
    files = [path for name in names if (path := find(model) / name).is_file()]
    return {
        "sources": loaded_sources(), "device": jax.devices()[0].device_kind,
        "versions": run_record.describe_environment()["versions"],
        "weights": checkpoint.weights_hash(model), "files": checkpoint.files_hash(files),
    }  # fmt: skip


def outside(policy: str) -> dict[str, str]:
    """A hash of the code of a policy outside of this repository, by name; empty for others. The
    code is the whole package, or all modules in the folder of a module without a package."""
    if policy in POLICIES:
        return {}
    name = policy.partition(":")[0]
    module = importlib.import_module(name)
    package = importlib.import_module(name.partition(".")[0])
    folders = getattr(package, "__path__", ())
    if not folders:
        file = Path(inspect.getfile(module))
        return {"policy": code_hash({file, *filter(is_python, file.parent.glob("*.py"))})}
    return {"policy": code_hash(path for each in folders for path in Path(each).rglob("*.py"))}


def is_python(path: Path) -> bool:
    """Whether a file can be parsed; files that cannot be are imported by no module."""
    try:
        compile(path.read_bytes(), path, "exec", flags=ast.PyCF_ONLY_AST)
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def path_of(output_dir: str | Path, name: str, asked: Any) -> Path:
    """The common path, without suffix, of the two files of a system's answers in one setting.

    name: part of the path of new answers. Existing answers keep their path.
    asked: all values that the answers depend on.
    """
    text = json.dumps(run_record.plain(asked), sort_keys=True)
    slug = re.sub("[^a-z0-9]+", "_", name.lower())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    answered = Path(output_dir) / "answered"
    before = min(answered.glob(f"*_{digest}.json"), default=answered / f"{slug}_{digest}")
    return before.with_suffix("")


def keep(path: Path, found: Evaluation) -> None:
    """Write the answers of a setting. The JSON comes last: if it exists, the .npz does too."""
    [held] = found.held.values()
    reference.write(path.with_suffix(".npz"), found.distributions)
    content = {"answers": found.answers, "held": held}
    run_record.write_json(path.parent, f"{path.name}.json", content)


def read(path: Path) -> Evaluation | None:
    """The answers that `keep` wrote; None if they are missing or incomplete."""
    try:
        content = json.loads(path.with_suffix(".json").read_bytes())
        # JSON holds nan and inf as text.
        answers = [Answer(**e | {"logprob": float(e["logprob"])}) for e in content["answers"]]
        distributions = reference.read(path.with_suffix(".npz"))
        held = [Held(**each) for each in content["held"]]
        [setting] = {(each.task, each.context) for each in answers}
        in_range = all(0 <= each.score <= 1 for each in answers)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if [each.key for each in answers] != list(distributions):
        return None
    if not in_range:
        return None
    return Evaluation(answers, distributions, {setting: held})
