"""Print constraints.txt from the report of `pip install --report` (see `make constraints`)."""

import json
import re
import sys

HEADER = """\
# Exact versions of what the project needs, its tests, the HTTP server, the notebooks, docs,
# GPUs, ahead-of-time GPU compilation, Ray, lm-evaluation-harness and the comparison with torch, for
# Python 3.12 and 3.13 alike.
# Made on Linux by `make constraints`: the newest versions that pyproject.toml allows, except JAX,
# which the Makefile names (`make test-newest-jax` frees it).
"""

with open(sys.argv[1]) as report:
    packages = [entry["metadata"] for entry in json.load(report)["install"]]
pins = {re.sub("[-_.]+", "-", p["name"]).lower(): p["version"] for p in packages}
del pins["paged-jax"]
print(HEADER + "\n".join(f"{name}=={version}" for name, version in sorted(pins.items())))
