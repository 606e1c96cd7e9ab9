"""KV-cache policies: owner and format of pages, kept tokens, and read pages (see `parts`)."""

import dataclasses
import importlib

from paged.kv_cache import diffkv, lserve, orca, vllm
from paged.kv_cache.policy import Policy

POLICIES: dict[str, Policy] = {
    "vllm": vllm.VLLM,
    "lserve": lserve.LSERVE,
    "diffkv": diffkv.DIFFKV,
    "orca_max": orca.ORCA_MAX,
    "orca_pow2": orca.ORCA_POW2,
    "orca_oracle": orca.ORCA_ORACLE,
    "fastertransformer": orca.FASTERTRANSFORMER,
}


def policy_of(name: str) -> Policy:
    """Return the policy `name`: a key of POLICIES, or 'MODULE:ATTRIBUTE'.

    MODULE is a user's Python module, which is imported; ATTRIBUTE is a `Policy` in it. Raises
    ValueError, with the reason, if there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute) or module.startswith("."):
        raise ValueError(f"policy must be {NAMES}, not {name!r}")
    try:
        policy = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy {name!r}: {error}") from error
    except SystemExit as error:
        raise ValueError(f"policy {name!r}: its module ends the program, as scripts do") from error
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} is a {type(policy).__name__}, not a Policy")
    for field in dataclasses.fields(policy):
        part = getattr(policy, field.name)
        may_lack = part is None and field.default is None
        if field.name != "options" and not may_lack and not callable(part):
            raise ValueError(f"policy {name!r}: {field.name} must be a function, not {part!r}")
    if not (isinstance(policy.options, type) and dataclasses.is_dataclass(policy.options)):
        raise ValueError(f"policy {name!r}: options must be a dataclass, not {policy.options!r}")
    return policy


NAMES = f"one of {', '.join(sorted(POLICIES))}, or MODULE:ATTRIBUTE"
