"""Engine configurations of DiffKV's studies (§7.2): the 16-bit reference, DiffKV and its baselines,
also for the tables on public benchmarks, whose model and problems the user supplies."""

import ast
import functools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from experiments import accuracy
from experiments.accuracy import AccuracyFlags
from experiments.lib import shipped
from experiments.lib.shipped import ROOT
from experiments.lib.text_files import read_lines, shown
from experiments.lib.typed_flags import flag
from experiments.papers.lserve.gates import gates_of
from models import checkpoint
from models.hub import find
from paged.config import EngineConfig
from paged.kv_cache import policy_of

REFERENCE = "16 bits"
FP16, DIFFKV, INT4, KIVI, QAQ = "FP16", "DiffKV", "INT4", "KIVI", "QAQ"
QUEST, SNAPKV = "Quest", "SnapKV"
KIVI_GROUP = 32  # channels of a value, or tokens of a key's channel, that share a scale
PAGE_SIZE = 16  # tokens of high precision in a page
SWITCHES = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
# Flags that a study's own flags replace.
OF_SIZE = ("model", "max_model_len", "kv_cache_tokens", "max_num_seqs")
BUDGETED = {
    "H2O": {"prompt_rule": "h2o", "generation_rule": "h2o"},
    "SnapKV": {"prompt_rule": "snapkv", "generation_rule": "keep"},
}


def _config(flags: AccuracyFlags, **fields: Any) -> EngineConfig:
    common = {"page_size": PAGE_SIZE} | accuracy.whole_prompts(flags)
    return accuracy.config_of(flags, **common | fields)


def reference(flags: AccuracyFlags) -> EngineConfig:
    """Pages of 16 bits (the paper's vLLM)."""
    return _config(flags, kv_dtype="float16")


def policy(flags: AccuracyFlags, **chosen: Any) -> EngineConfig:
    """DiffKV with the policy options `chosen`. Raises ValueError for invalid options."""
    return _config(flags, policy="diffkv", policy_options=chosen)


def three_levels(flags: AccuracyFlags, alpha: Sequence[float]) -> EngineConfig:
    """DiffKV with three levels (§7.2): 16 bits, K8V4 and K4V2, with an alpha for each. A page takes
    about as many bytes as in DiffKV: half as many tokens of the highest precision, of about twice
    the bytes each."""
    chosen: dict[str, Any] = {"top": "K16V16"}
    chosen |= dict(zip(("alpha_top", "alpha_h", "alpha_l"), alpha, strict=True))
    return _config(flags, policy="diffkv", policy_options=chosen, page_size=PAGE_SIZE // 2)


def uniform_options(name: str) -> dict[str, Any]:
    """Options that keep all tokens in one format, such as K8V4."""
    return {"high": name, "low": name, "alpha_h": 0.0, "alpha_l": 0.0}


def uniform(flags: AccuracyFlags, name: str) -> EngineConfig:
    return policy(flags, **uniform_options(name))


def budgeted(flags: AccuracyFlags, method: str, budget: float) -> EngineConfig:
    """Pruning to a share of the tokens, kept in 16 bits. method: a key of `BUDGETED`."""
    return policy(flags, **uniform_options("K16V16") | BUDGETED[method] | {"budget": budget})


def duo_attention(flags: AccuracyFlags, gates: str, share: float) -> EngineConfig:
    """DuoAttention by its flag file, all tokens in 16 bits.

    gates: path of the gate file.
    share: share of the KV heads that stream, chosen by the gates.
    """
    options = json.dumps({"gates": gates_of(flags.model, gates)})
    return of_flags(flags, (
        "duo_attention", f"--policy_options={options}", f"--lserve_streaming_share={share}",
        "--kv_dtype=float16",
    ))  # fmt: skip


def quest(flags: AccuracyFlags, budget: int) -> EngineConfig:
    """Quest: all tokens are kept in 16 bits, and each query reads `budget` of them, in the first
    two layers all."""
    return of_flags(flags, ("quest", f"--lserve_budget={budget}", "--kv_dtype=float16"))


@dataclass(frozen=True)
class DiffKVFlags(AccuracyFlags):
    contexts: tuple[int, ...] = flag((32768,), "the longest prompt and answer, in tokens")
    alpha_h: float = flag(1.0, "of high precision", least=0)
    alpha_l: float = flag(0.02, "of low precision", least=0)
    budget: float = flag(0.25, "of SnapKV, share of the tokens", above=0, most=1)
    quest_budget: int = flag(8192, "tokens that a query of Quest reads", least=48)


def kivi(flags: AccuracyFlags) -> EngineConfig:
    """The configuration of configs/kivi.flags, at the model's head dim."""
    groups = max(1, checkpoint.load_config(flags.model).head_dim // KIVI_GROUP)
    chosen: dict[str, Any] = {
        "high": "K16V16", "low": "K2V2", "prompt_rule": "kivi", "generation_rule": "kivi",
        "window": 128, "key_group": KIVI_GROUP, "groups": groups,
    }  # fmt: skip
    return _config(flags, policy="diffkv", policy_options=chosen, page_size=12)


def qaq(flags: AccuracyFlags) -> EngineConfig:
    return of_flags(flags, ("diffkv", "qaq"))


def of_flags(flags: AccuracyFlags, given: Sequence[str]) -> EngineConfig:
    """The configuration of an engine that flags define. Prompts are prefilled whole.

    given: names of flag files of configs/, paths of other flag files (*.flags), and flags
        (--name=value). The last of several values of a flag counts. OF_SIZE and the model are the
        study's. Gate files are read from the model's folder.

    Raises ValueError for a file that cannot be read, for a flag that is no field of EngineConfig
    and no option of the policy, for an invalid value, and for gates that the model lacks.
    """
    chosen = {name: value for name, value in _values(given).items() if name not in OF_SIZE}
    policy_name = str(chosen.get("policy", EngineConfig.policy))
    policy = policy_of(policy_name)
    weights_hash = functools.partial(checkpoint.weights_hash, flags.model)
    options: dict[str, Any] = chosen.pop("policy_options", {})
    if not isinstance(options, dict):
        raise ValueError(f"--policy_options in {', '.join(given)} must be an object of JSON")
    for field in fields(policy.options):
        value = chosen.pop(f"{policy_name}_{field.name}", None)
        if value is not None and (read := field.metadata.get("read")):
            value = read(str(find(flags.model) / str(value).rpartition("/")[2]), weights_hash)
        if value is not None:
            options[field.name] = value
    if unknown := chosen.keys() - {field.name for field in fields(EngineConfig)}:
        raise ValueError(
            f"--{min(unknown)} in {', '.join(given)} is no flag of an engine with "
            f"--policy={policy_name}"
        )
    return accuracy.config_of(
        flags, **accuracy.whole_prompts(flags) | chosen, policy_options=options
    )


def with_others(
    found: accuracy.Systems, flags: AccuracyFlags, others: Sequence[str]
) -> accuracy.Systems:
    """The systems and those of flag files, by the files' names. Raises ValueError for a name that
    another system has in the names of values."""
    found = dict(found)
    for each in others:
        name, keys = Path(each).stem, {key_of(known): known for known in found}
        if other := keys.get(key_of(name)):
            raise ValueError(
                f"--others: {each} has the name of another system, {other}; rename the file"
            )
        found[name] = of_flags(flags, (each,))
    return found


def key_of(system: str) -> str:
    """A system's name in names of values."""
    return re.sub(r"\W+", "_", system).lower()


def _values(given: Sequence[str], within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Values of flags by name. within: the flag files that name these files."""
    found: dict[str, Any] = {}
    for each in given:
        if each.startswith("--"):
            found |= [_pair(each, each)]
            continue
        path = Path(each) if each.endswith(".flags") else ROOT / f"configs/{each}.flags"
        lines = ((number, line.strip()) for number, line in enumerate(read_lines(path), 1))
        own = [
            _pair(line, f"{path}:{number}")
            for number, line in lines if line and not line.startswith(("#", "//"))
        ]  # fmt: skip
        if not own:
            raise ValueError(f"{path}: holds no flag")
        if path in within:
            raise ValueError(f"{path}: names itself as a --flagfile")
        for name, value in own:
            if name == "flagfile":
                found |= _values([shipped.found(str(value))], (*within, path))
            else:
                found[name] = value
    return found


def _pair(line: str, where: str) -> tuple[str, Any]:
    """The name and value of a flag, written as -name=value, --name=value or --noname."""
    form = re.fullmatch(r"--?(\w+)(?:=(.*))?", line)
    if form is None:
        raise ValueError(f"{where}: flags are --name=value, not {shown(line)}")
    name, text = form.groups()
    switches = {f.name for f in fields(EngineConfig) if isinstance(f.default, bool)}
    if text is not None:
        value = _value(text)
        return name, SWITCHES.get(str(value).lower(), value) if name in switches else value
    off = name.removeprefix("no")
    if name not in switches and off not in switches:
        raise ValueError(f"{where}: --{name} needs a value, as --{name}=value")
    return (name, True) if name in switches else (off, False)


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return text


def long_context(flags: DiffKVFlags) -> accuracy.Systems:
    """The systems of Table 2."""
    return {
        FP16: reference(flags),
        DIFFKV: policy(flags, alpha_h=flags.alpha_h, alpha_l=flags.alpha_l),
        QUEST: quest(flags, flags.quest_budget),
        SNAPKV: budgeted(flags, "SnapKV", flags.budget),
    }


def thinking(flags: DiffKVFlags) -> accuracy.Systems:
    """The systems of Table 3."""
    first, ours, *others = long_context(flags).items()
    return dict([first, ours, (INT4, uniform(flags, "K4V4")), (KIVI, kivi(flags)), *others])
