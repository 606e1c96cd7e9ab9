"""Flags that several programs define, and what their values make.

A program defines its flags in a function that `program.Program` calls, so that any two programs can
be imported together. Only `program` reads flags: all else gets plain values.
"""

import functools
import json
import math
from collections.abc import Callable, Collection
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from absl import flags

from experiments.lib import shipped
from experiments.lib.engines import EXECUTORS, GPU_PAGE_SIZE, engine_config
from experiments.lib.help import group
from experiments.lib.program import Options
from experiments.lib.typed_flags import Flags, ModelFlags, parts_of
from models import checkpoint
from paged.checks import help_of
from paged.engine import EngineConfig
from paged.kv_cache import POLICIES
from paged.simulator.machines import MACHINES
from paged.simulator.step_cost import HOSTS

flags.disclaim_key_flags()  # --help lists the flags as the program's own
_DEFINE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}
_LOADING = ("model", "dtype", "attention_implementation", "compilation_cache", "executor")


class _FiniteParser(flags.FloatParser):
    """Bounds alone let nan pass, and one bound infinity."""

    def convert(self, argument) -> float:
        value = super().convert(argument)
        if not math.isfinite(value):
            raise ValueError(f"{argument} is not a finite number")
        return value


def define_float(
    name: str,
    default: float,
    help: str,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
) -> None:
    """As `flags.DEFINE_float`, of a flag that takes finite numbers only."""
    parser = _FiniteParser(lower_bound, upper_bound)
    flags.DEFINE(parser, name, default, help, serializer=flags.ArgumentSerializer())


class _PathParser(flags.ArgumentParser):
    def parse(self, argument: str) -> str:
        return shipped.found(argument)


def define_path(name: str, default: str, help: str) -> None:
    """As `flags.DEFINE_string`, for a flag that names an input file or folder: the project's own
    are found from any working directory."""
    flags.DEFINE(_PathParser(), name, default, help, serializer=flags.ArgumentSerializer())


class _TupleParser(flags.ArgumentParser):
    """Of numbers or texts with commas between them."""

    syntactic_help = "a comma separated list"

    def __init__(self, kind: type):
        self._kind = kind

    def parse(self, argument) -> tuple:
        given = argument.split(",") if isinstance(argument, str) else argument
        return tuple(self._kind(each) for each in given if each != "")


def define_fields(config, leave_out: Collection[str] = ()) -> None:
    """Define a flag for each field of a dataclass that has a help text, a default, and a type that
    a flag can have: bool, int, float, str, literals of one of these, one of these or None, or a
    tuple of any number of one of these. Fields of `typed_flags.flag` have choices, or are paths.

    config: the class, or an instance whose values are to be the defaults.
    """
    hints = get_type_hints(config if isinstance(config, type) else type(config))
    metadata = {field.name: field.metadata for field in fields(config)}
    for name, text in help_of(config).items():
        if name in leave_out or not hasattr(config, name):
            continue
        default, kind = getattr(config, name), _kind(hints[name])
        if get_origin(hints[name]) is tuple:
            parser = _TupleParser(get_args(hints[name])[0])
            flags.DEFINE(parser, name, default, text, serializer=flags.CsvListSerializer(","))
        elif metadata[name].get("path"):
            define_path(name, default, text)
        elif "choices" in metadata[name]:
            flags.DEFINE_enum(name, default, metadata[name]["choices"], text)
        elif kind:
            _DEFINE[kind](name, default, text)


def _kind(hint) -> type | None:
    """What a flag for such a field holds; None where no flag can."""
    if isinstance(hint, UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return _kind(rest[0]) if len(rest) == 1 else None
    if get_origin(hint) is Literal:
        kinds = {type(value) for value in get_args(hint)}
        return _kind(kinds.pop()) if len(kinds) == 1 else None
    return hint if hint in _DEFINE else None


def fields_of(dataclass: type, options: Options) -> dict[str, Any]:
    """The values of the flags that are called like its fields, and of EngineConfig the options of
    --policy too.

    Raises ValueError for the option of another policy, and for a file of options that holds none.
    """
    named = {field.name for field in fields(dataclass)}
    values = {name: value for name, value in vars(options).items() if name in named}
    if isinstance(values.get("policy_options", ""), str):  # not options that were read before
        values.pop("policy_options", None)
        if "policy_options" in named and (chosen := _policy_options(options)):
            values["policy_options"] = chosen
    return values


def _define_policy_flags() -> None:
    """Define a flag --POLICY_FIELD for each option of a KV policy that has a help text. Where its
    metadata have a function under "read", the flag names a file."""
    flags.DEFINE_string(
        "policy_options", "", "a JSON object: the options of --policy=MODULE:ATTRIBUTE"
    )
    for policy, declared in POLICIES.items():
        hints = get_type_hints(declared.options)
        with group(f"--policy={policy}"):
            for each in fields(declared.options):
                name, text = f"{policy}_{each.name}", each.metadata.get("help")
                if text and "read" in each.metadata:
                    define_path(name, "", text)
                elif text and (kind := _kind(hints[each.name])):
                    _DEFINE[kind](name, each.default, text)


def _policy_options(options: Options) -> dict[str, Any]:
    """Those that flags change, by name; the files that they name are read."""
    values = _json_options(getattr(options, "policy_options", ""))
    for policy, declared in POLICIES.items():
        for each in fields(declared.options):
            read = each.metadata.get("read")
            default = "" if read else each.default
            value = getattr(options, f"{policy}_{each.name}", default)
            if value == default:
                continue
            if policy != options.policy:
                raise ValueError(
                    f"--{policy}_{each.name} is an option of --policy={policy}, not of "
                    f"--policy={options.policy}"
                )
            weights_hash = functools.partial(checkpoint.weights_hash, getattr(options, "model", ""))
            values[each.name] = read(value, weights_hash) if read else value
    return values


def _json_options(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--policy_options: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--policy_options must be a JSON object, not {text}")
    return values


def loading(options: object) -> dict[str, Any]:
    """The values that `engines.load_engine` takes by name."""
    return {name: value for name, value in vars(options).items() if name in _LOADING}


def define_model_flags() -> None:
    """Define what `loading` takes."""
    with group("model"):
        define_fields(ModelFlags)


def define_model() -> None:
    define_path("model", "bundled", help_of(ModelFlags)["model"])


def define_dtype(default: str) -> None:
    flags.DEFINE_enum("dtype", default, checkpoint.DTYPES, help_of(ModelFlags)["dtype"])


def define_executor_flag() -> None:
    """Define --executor, which `loading` takes where it is defined."""
    flags.DEFINE_enum("executor", "device", EXECUTORS, "what runs the steps")


def define_simulated_flags(gpu: str) -> None:
    """Define --gpu and --host, the arguments of `StepCost.declare`."""
    flags.DEFINE_enum("gpu", gpu, list(MACHINES), "simulated GPU, by its data sheet")
    flags.DEFINE_enum("host", "none", list(HOSTS), "system whose host time a step includes")


def define_engine_flags(defaults: EngineConfig | None = None) -> None:
    """Define the fields of EngineConfig, of which --seed is the workload's too, and what `loading`
    takes. defaults: None for those of EngineConfig, with the model's longest sequence and the
    device's page size."""
    define_model_flags()
    longest, page_size = help_of(EngineConfig)["max_model_len"], help_of(EngineConfig)["page_size"]
    if defaults is None:
        longest += f"; the model's by default, up to {EngineConfig.max_model_len}"
        page_size += f"; by default {EngineConfig.page_size}, and {GPU_PAGE_SIZE} on GPUs"
    with group("engine"):
        flags.DEFINE_integer("max_model_len", getattr(defaults, "max_model_len", None), longest)
        flags.DEFINE_integer("page_size", getattr(defaults, "page_size", None), page_size)
        flags.DEFINE_integer("seed", 0, "of the workload and of sampling", lower_bound=0)
        define_fields(defaults or EngineConfig, leave_out=("max_model_len", "page_size", "seed"))
    _define_policy_flags()


def define_typed(kind: type[Flags]) -> None:
    """Define a flag for each field of `kind`, and for those of its parts. An EngineConfig beside a
    model has --seed and the options of policies too."""
    taken: set[str] = set()
    parts = parts_of(kind)
    engine = next((part for part in parts.values() if isinstance(part, EngineConfig)), None)
    if issubclass(kind, ModelFlags):
        taken |= help_of(ModelFlags).keys()
        if engine is None:
            define_model_flags()
        else:
            define_engine_flags(None if engine == EngineConfig() else engine)
            taken |= {"seed", *help_of(EngineConfig)}
    define_fields(kind, leave_out=taken)
    taken |= help_of(kind).keys()
    for part in parts.values():
        define_fields(part, leave_out=taken)


def typed[F: Flags](kind: type[F], options: Options) -> F:
    """The flags that `define_typed` has defined. Raises ValueError for values that cannot be."""
    values = {name: getattr(options, name) for name in help_of(kind)}
    for name, part in parts_of(kind).items():
        found = fields_of(type(part), options)
        if isinstance(part, EngineConfig) and issubclass(kind, ModelFlags):
            values[name] = engine_config(checkpoint.load_config(options.model), **found)
        else:
            values[name] = type(part)(**found)
    return kind(**values)
