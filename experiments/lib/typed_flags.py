"""Flags of a program as a frozen dataclass: each field typed, with a help text and bounds."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from experiments.lib.engines import COMPILATION_CACHE, EXECUTORS
from models import checkpoint
from paged.checks import described, is_real, is_text, is_whole, make_plain, outside, refusal
from pallas_kernels.paged_attention.api import DECODE, PREFILL

IS_OF = {int: (is_whole, "whole numbers"), float: (is_real, "numbers"), str: (is_text, "texts")}


def flag[T](
    default: T, help: str, *, least: float | None = None, above: float | None = None,
    most: float | None = None, choices: Any = None, path: bool = False, none: bool = False,
) -> T:  # fmt: skip
    """A field of `Flags`.

    least, above, most: bounds of a number, or of each number of a tuple.
    choices: the values allowed.
    path: an input file or folder; files that ship with the project are found from any folder.
    none: whether a tuple with a non-empty default may be empty.
    """
    bounds = {
        "least": least, "above": above, "most": most, "choices": choices, "path": path,
        "none": none,
    }  # fmt: skip
    given = {
        name: value for name, value in bounds.items() if value is not None and value is not False
    }
    return dataclasses.field(default=default, metadata={"help": help} | given)


def arguments(help: str) -> tuple[str, ...]:
    """A field of `Flags`: the arguments of the command line that are not flags."""
    return dataclasses.field(default=(), metadata={"help": help, "arguments": True})


def part[T](default: T, leave_out: Collection[str] = ()) -> T:
    """A field of `Flags` that is a dataclass. leave_out: names of fields without a flag."""
    return dataclasses.field(default=default, metadata={"leave_out": leave_out})


@dataclass(frozen=True)
class Flags:
    """Base of a program's flags. A field is

    - a bool, int, float, str or tuple of numbers or texts, made by `flag` or `described`;
    - `arguments`; or
    - a dataclass of such fields, each of which becomes a flag (`part`).

    A subclass adds checks in its own `__post_init__`. Raises ValueError for an invalid value.
    """

    @classmethod
    def begin(cls, values: Mapping[str, Any]) -> None:
        """Called with all values by name before the EngineConfig is made. EngineConfig counts JAX's
        devices, so their number must be set here. Raises ValueError for invalid values."""

    def __post_init__(self):
        make_plain(self)
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if get_origin(hints[field.name]) is tuple:
                self._check_tuple(field, value, get_args(hints[field.name])[0])
            elif (allowed := _allowed(field.metadata, value)) is not None:
                raise refusal(f"--{field.name}", allowed, value)

    def _check_tuple(self, field: dataclasses.Field, value: Any, kind: type) -> None:
        is_one, named = IS_OF[kind]
        if not isinstance(value, tuple) or not all(map(is_one, value)):
            raise refusal(f"--{field.name}", named, value)
        if field.default and not value and "none" not in field.metadata:
            raise ValueError(f"--{field.name} must name at least one")
        for each in value:
            if (allowed := _allowed(field.metadata, each)) is not None:
                raise refusal(f"--{field.name}", f"{named}, each {allowed}", each)


def parts_of(kind: type[Flags]) -> dict[str, Any]:
    """The defaults of the fields that are dataclasses, by name."""
    return {
        f.name: f.default for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.default)
    }


def _allowed(metadata: Any, value: Any) -> str | None:
    """The allowed values in words, if the value is not allowed; else None."""
    if "choices" in metadata and value not in metadata["choices"]:
        return f"one of {', '.join(map(str, metadata['choices']))}"
    return outside(metadata, value)


@dataclass(frozen=True)
class ModelFlags(Flags):
    """Keyword arguments of `engines.load_engine`, without the executor."""

    model: str = flag(
        "bundled",
        "'bundled', 'judge', a hub id, or a Hugging Face folder: config.json, safetensors and a "
        "tokenizer (tokenizer.json, or files that transformers converts to it)",
        path=True,
    )
    dtype: str = flag(
        "float32", "of weights, computation and KV cache", choices=tuple(checkpoint.DTYPES)
    )
    attention_implementation: str = flag(
        "",
        "of the attention ops; empty for the device's own. mosaic_gpu runs in Pallas's interpreter "
        "where there is no GPU",
        choices=("", *(name for name in DECODE if name in PREFILL)),
    )
    compilation_cache: str = described(
        COMPILATION_CACHE,
        "folder that keeps compiled programs for the next run, and grows with each shape; may be "
        "deleted; empty for none",
    )


@dataclass(frozen=True)
class ExecutorFlags(ModelFlags):
    """ModelFlags with a choice of the executor."""

    executor: str = flag("device", "what runs the steps", choices=EXECUTORS)


@dataclass(frozen=True)
class Output(Flags):
    """The output folder of a program. `Program.output` is an instance with the program's defaults.
    An empty `output_dir` writes no files."""

    output_dir: str = flag("", "folder of all that is written")
    overwrite: bool = flag(
        False,
        "replace a run with other flags in --output_dir; without it such a folder is refused, or "
        "numbered if it is the default one",
    )

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)
