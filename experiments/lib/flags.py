"""A program's flags, defined from the fields of its `typed_flags` dataclass, and their --help."""

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from absl import app, flags

from experiments.lib import shipped
from experiments.lib.engines import GPU_PAGE_SIZE, engine_config
from experiments.lib.typed_flags import Flags, ModelFlags, parts_of
from models import checkpoint
from paged.checks import help_of
from paged.engine import EngineConfig
from paged.kv_cache import POLICIES

flags.disclaim_key_flags()  # --help lists the flags as the program's own
OWN = "program"  # the group of flags that are in no other group
_DEFINE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}
_LOADING = ("model", "dtype", "attention_implementation", "compilation_cache", "executor")


@contextmanager
def group(title: str) -> Iterator[None]:
    """Flags defined in this context form one group of --help, without flags of inner groups."""
    before = set(flags.FLAGS)
    yield
    # absl's help lists key flags by module: a group is registered as if it were a module.
    grouped = {flag.name for one in flags.FLAGS.key_flags_by_module_dict().values() for flag in one}
    for name in set(flags.FLAGS) - before - grouped:
        flags.FLAGS.register_key_flag_for_module(title, flags.FLAGS[name])


class Help(app.HelpFlag):
    """Replaces absl's --help, which has no groups and exits with status 1."""

    def __init__(self):
        super().__init__()
        self.allow_override = True

    def parse(self, argument) -> None:
        if self._parse(argument):
            titles = sorted(flags.FLAGS.key_flags_by_module_dict(), key=lambda title: title != OWN)
            print(sys.modules["__main__"].__doc__ or f"{sys.argv[0]} [--name=value ...]")
            print(*map(flags.FLAGS.module_help, titles), sep="\n")
            print("\n--helpfull lists those of libraries, too.", flush=True)
            sys.exit()


class _PathParser(flags.ArgumentParser):
    """An input file or folder. Files that ship with the project are found from any folder."""

    def parse(self, argument: str) -> str:
        return shipped.found(argument)


class _TupleParser(flags.ArgumentParser):
    """A tuple of numbers or texts, separated by commas."""

    syntactic_help = "a comma separated list"

    def __init__(self, kind: type):
        self._kind = kind

    def parse(self, argument) -> tuple:
        given = argument.split(",") if isinstance(argument, str) else argument
        return tuple(self._kind(each) for each in given if each != "")


def define_fields(config, leave_out: Collection[str] = ()) -> None:
    """Define a flag for each field of a dataclass that has a help text, a default, and a type T:
    bool, int, float or str; a Literal of one of these types; T | None; or tuple[T, ...]. A field's
    metadata, set by `typed_flags.flag`, may hold choices or mark a path.

    config: the class, or an instance whose values become the defaults.
    """
    hints = get_type_hints(config if isinstance(config, type) else type(config))
    metadata = {field.name: field.metadata for field in fields(config)}
    for name, text in help_of(config).items():
        if name in leave_out or not hasattr(config, name) or "arguments" in metadata[name]:
            continue
        default, kind = getattr(config, name), _kind(hints[name])
        if get_origin(hints[name]) is tuple:
            parser = _TupleParser(get_args(hints[name])[0])
            flags.DEFINE(parser, name, default, text, serializer=flags.CsvListSerializer(","))
        elif metadata[name].get("path"):
            _define_path(name, default, text)
        elif "choices" in metadata[name] and kind is str:
            flags.DEFINE_enum(name, default, metadata[name]["choices"], text)
        elif kind:
            _DEFINE[kind](name, default, text)


def _define_path(name: str, default: str, help: str) -> None:
    flags.DEFINE(_PathParser(), name, default, help, serializer=flags.ArgumentSerializer())


def _kind(hint) -> type | None:
    """The type of a flag for a field with this type hint; None if no flag can hold it."""
    if isinstance(hint, UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        return _kind(rest[0]) if len(rest) == 1 else None
    if get_origin(hint) is Literal:
        kinds = {type(value) for value in get_args(hint)}
        return _kind(kinds.pop()) if len(kinds) == 1 else None
    return hint if hint in _DEFINE else None


def fields_of(dataclass: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the flags named like the dataclass's fields; for EngineConfig also the options
    of --policy.

    Raises ValueError for an option of another policy, and for an invalid file of options.
    """
    named = {field.name for field in fields(dataclass)} - {"policy_options"}
    found = {name: value for name, value in values.items() if name in named}
    if dataclass is EngineConfig and (chosen := _policy_options(values)):
        found["policy_options"] = chosen
    return found


def _define_policy_flags() -> None:
    """Define a flag --POLICY_FIELD for each KV policy option that has a help text. If an option's
    metadata has a function "read", the flag is a path, and the function loads the file."""
    with group("--policy=MODULE:ATTRIBUTE"):
        flags.DEFINE_string("policy_options", "", "a JSON object: the policy's options")
    for policy, declared in POLICIES.items():
        hints = get_type_hints(declared.options)
        with group(f"--policy={policy}"):
            for each in fields(declared.options):
                name, text = f"{policy}_{each.name}", each.metadata.get("help")
                if text and "read" in each.metadata:
                    _define_path(name, "", text)
                elif text and (kind := _kind(hints[each.name])):
                    _DEFINE[kind](name, each.default, text)


def _policy_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The policy options that flags change from their defaults, by name. Named files are loaded."""
    values = _json_options(given.get("policy_options", ""))
    for policy, declared in POLICIES.items():
        for each in fields(declared.options):
            read = each.metadata.get("read")
            default = "" if read else each.default
            value = given.get(f"{policy}_{each.name}", default)
            if value == default:
                continue
            if policy != given["policy"]:
                raise ValueError(
                    f"--{policy}_{each.name} is an option of --policy={policy}, not of "
                    f"--policy={given['policy']}"
                )
            if each.name in values:
                raise ValueError(
                    f"--{policy}_{each.name} and --policy_options both give {each.name!r}"
                )
            weights_hash = functools.partial(checkpoint.weights_hash, given.get("model", ""))
            values[each.name] = read(value, weights_hash) if read else value
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name is given twice in {[name for name, _ in pairs]}")
    return values


def _json_options(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}", object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--policy_options must be a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--policy_options must be a JSON object, not {text}")
    return values


def loading(options: Flags) -> dict[str, Any]:
    """The keyword arguments of `engines.load_engine`, with their values."""
    return {name: value for name, value in vars(options).items() if name in _LOADING}


def _define_engine_flags(defaults: EngineConfig | None) -> None:
    """Define the fields of EngineConfig. --seed also seeds the workload. defaults: None for
    EngineConfig's own, with the model's longest sequence and the device's page size."""
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
    """Define a flag for each field of `kind` and of its parts, a group for each part. An
    EngineConfig in a ModelFlags also gets --seed and the policies' options."""
    taken: set[str] = set()
    parts = parts_of(kind)
    if issubclass(kind, ModelFlags):
        taken |= help_of(ModelFlags).keys()
        with group("model"):
            define_fields(ModelFlags)
        for engine in (part for part in parts.values() if isinstance(part, EngineConfig)):
            _define_engine_flags(None if engine == EngineConfig() else engine)
            taken |= {"seed", *help_of(EngineConfig)}
    with group(OWN):
        define_fields(kind, leave_out=taken)
    taken |= help_of(kind).keys()
    left_out = {field.name: field.metadata.get("leave_out", ()) for field in fields(kind)}
    for name, part in parts.items():
        with group(name):
            define_fields(part, leave_out={*taken, *left_out[name]})
        taken |= help_of(part).keys()


def typed[F: Flags](kind: type[F], values: Mapping[str, Any], arguments: Sequence[str] = ()) -> F:
    """An instance of `kind` with the values of the flags that `define_typed` defined.

    arguments: arguments of the command line that are not flags.
    Raises ValueError for invalid values or unexpected arguments.
    """
    named = {f.name for f in fields(kind) if "arguments" in f.metadata}
    if arguments and not named:
        raise ValueError(f"unexpected argument {arguments[0]!r}: flags are --name=value")
    found: dict[str, Any] = dict.fromkeys(named, tuple(arguments))
    found |= {name: values[name] for name in help_of(kind) if name not in named}
    kind.begin(values)
    for name, part in parts_of(kind).items():
        of_part = fields_of(type(part), values)
        if isinstance(part, EngineConfig) and issubclass(kind, ModelFlags):
            found[name] = engine_config(checkpoint.load_config(values["model"]), **of_part)
        else:
            found[name] = type(part)(**of_part)
    return kind(**found)
