"""What the systems of studies have answered, kept in a folder for later runs and other studies.

Answers depend on the system, the inputs and the sources. Each combination has a folder of its own
in `answered/`, so that studies that run at once never mix their answers, whatever they call the
system.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.lib import reference, run_record, shipped
from experiments.lib.answers import Evaluation, read
from experiments.lib.kv_held import Held
from experiments.lib.sources import code_hash
from experiments.tasks.files import Problems
from models import checkpoint
from models.hub import TOKENIZER_FILES, find

# The sources that ask, answer and grade.
SOURCES = (
    "pallas_kernels", "models", "paged", "experiments/tasks", "experiments/evaluate.py",
    "experiments/lib/engines.py", "experiments/lib/kv_held.py", "experiments/lib/reference.py",
    "experiments/lib/report.py",
)  # fmt: skip
MADE_BY = ("sources_sha256", "inputs_sha256", "weights_sha256", "jax")


def sources_hash(root: Path = shipped.ROOT, names: Sequence[str] = SOURCES) -> str:
    """SHA-256, in hex, of the code of these names in a checkout or installation."""
    chosen = [root / name for name in names]
    found = {path for each in chosen for path in (each, *each.rglob("*.py")) if path.is_file()}
    return code_hash(found)


def made_by(model: str, problems: Problems) -> dict[str, str]:
    """What answers depend on beside flags: `MADE_BY`."""
    folder = find(model)
    texts = [[*key, [dataclasses.asdict(p) for p in asked]] for key, asked in problems.items()]
    files = [folder / name for name in ("config.json", *TOKENIZER_FILES)]
    inputs = json.dumps(texts) + checkpoint.files_hash(path for path in files if path.is_file())
    return {
        "sources_sha256": sources_hash(),
        "inputs_sha256": hashlib.sha256(inputs.encode()).hexdigest(),
        "weights_sha256": checkpoint.weights_hash(model),
        "jax": jax.__version__,
    }


def folder_of(output_dir: str | Path, name: str, asked: Any) -> Path:
    """The folder of a system's answers, under the name by which it was asked first. asked: all that
    they depend on."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    answered = Path(output_dir) / "answered"
    before = sorted(answered.glob(f"*_{digest}"))
    return before[0] if before else answered / f"{_slug(name)}_{digest}"


def _slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "_", name.lower())


def keep(folder: Path, asked: Any, found: Evaluation) -> None:
    """Write what a system has answered so far. prompts.csv is written last, so that the other files
    have all of its prompts."""
    run_record.write_json(folder, "asked.json", asked)
    held = [[*key, vars(each)] for key, all_held in found.held.items() for each in all_held]
    run_record.write_json(folder, "held.json", held)
    reference.write(folder / "distributions.npz", found.distributions)
    run_record.write_csv(folder, "prompts.csv", found.answers)


def answered_before(folder: Path, asked: Any) -> Evaluation:
    """The complete settings that `keep` wrote, if the system was asked the same then."""
    kept = Evaluation()
    try:
        if json.loads((folder / "asked.json").read_text()) != asked:
            return kept
        found = read(str(folder / "prompts.csv"))
        for task, context, held in json.loads((folder / "held.json").read_text()):
            found.held.setdefault((task, context), []).append(Held(**held))
    except (OSError, ValueError, TypeError):
        return kept
    for setting, count in asked["prompts"].items():
        task, context = setting.split()
        answers = [a for a in found.answers if (a.task, a.context) == (task, int(context))]
        keys = [answer.key for answer in answers]
        if len(set(keys)) == count and found.distributions.keys() >= set(keys):
            kept.answers.extend(answers)
            kept.distributions.update({key: found.distributions[key] for key in keys})
            kept.held[task, int(context)] = found.held.get((task, int(context)), [])
    return kept


def made_otherwise(output_dir: str | Path, name: str, asked: Mapping[str, Any]) -> list[str]:
    """The names of `MADE_BY` that changed since a system was asked the same; empty if it never
    was."""
    for path in sorted((Path(output_dir) / "answered").glob(f"{_slug(name)}_*/asked.json")):
        try:
            before = json.loads(path.read_text())
            differ = [each for each in asked if before.get(each) != asked[each]]
        except (OSError, ValueError, AttributeError):
            continue
        if differ and set(differ) <= set(MADE_BY):
            return differ
    return []
