"""A second process with several CPU devices: a process fixes its number of devices once."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from paged.device.executor import DeviceExecutor
from paged.engine import Engine

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)


def printed_with_devices(module: str, count: int, *arguments: str):
    """Run a test module as a program with `count` CPU devices. Return the JSON that it prints."""
    # Programs as small as the tests' take longer to optimise than to run.
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )  # fmt: skip
    return json.loads(done.stdout)


def collectives(engine: Engine) -> list[Counter[str]]:
    """The number of each collective in each program that the engine has compiled."""
    assert isinstance(engine.executor, DeviceExecutor)
    texts = [program.as_text() or "" for program in engine.executor._programs.values()]
    return [Counter(COLLECTIVE.findall(text)) for text in texts]
