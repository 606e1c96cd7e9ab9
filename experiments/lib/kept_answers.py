"""What the systems of studies have answered, kept in a folder for later runs and other studies.

The answers of a setting, a task at a context, depend on the system, the prompts and the sources: a
hash of all that names their files in `answered/`, JSON beside the distributions. Studies that run
at once in a folder never mix their answers, and those that ask the same share them.
"""

import hashlib
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

# The sources that ask, answer and grade.
SOURCES = (
    "pallas_kernels", "models", "paged", "experiments/tasks", "experiments/evaluate.py",
    "experiments/lib/engines.py", "experiments/lib/kv_held.py", "experiments/lib/reference.py",
    "experiments/lib/report.py",
)  # fmt: skip


def sources_hash(root: Path = shipped.ROOT, names: Sequence[str] = SOURCES) -> str:
    """SHA-256, in hex, of the code of these names in a checkout or installation."""
    chosen = [root / name for name in names]
    found = {path for each in chosen for path in (each, *each.rglob("*.py")) if path.is_file()}
    return code_hash(found)


def made_by(model: str) -> dict[str, str]:
    """What answers depend on beside flags and prompts."""
    files = [find(model) / name for name in ("config.json", *TOKENIZER_FILES)]
    return {
        "sources": sources_hash(), "jax": jax.__version__,
        "weights": checkpoint.weights_hash(model),
        "files": checkpoint.files_hash(path for path in files if path.is_file()),
    }  # fmt: skip


def path_of(output_dir: str | Path, name: str, asked: Any) -> Path:
    """The files of a system's answers to a setting, without their endings, under the name by which
    it was asked first. asked: all that they depend on."""
    text = json.dumps(run_record.plain(asked), sort_keys=True)
    slug = re.sub("[^a-z0-9]+", "_", name.lower())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    answered = Path(output_dir) / "answered"
    before = min(answered.glob(f"*_{digest}.json"), default=answered / f"{slug}_{digest}")
    return before.with_suffix("")


def keep(path: Path, found: Evaluation) -> None:
    """Write the answers of a setting. The JSON is last, so that nothing else is missing."""
    [held] = found.held.values()
    reference.write(path.with_suffix(".npz"), found.distributions)
    content = {"answers": found.answers, "held": held}
    run_record.write_json(path.parent, f"{path.name}.json", content)


def read(path: Path) -> Evaluation | None:
    """What `keep` wrote; None if there is none, or none that is whole."""
    try:
        content = json.loads(path.with_suffix(".json").read_bytes())
        answers = [Answer(**each) for each in content["answers"]]
        distributions = reference.read(path.with_suffix(".npz"))
        held = [Held(**each) for each in content["held"]]
        [setting] = {(each.task, each.context) for each in answers}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if [each.key for each in answers] != list(distributions):
        return None
    return Evaluation(answers, distributions, {setting: held})
