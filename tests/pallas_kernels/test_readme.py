"""The example in the library's README runs."""

import doctest
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs():
    failed, tried = doctest.testfile(
        str(ROOT / "pallas_kernels" / "README.md"), module_relative=False
    )
    assert tried > 0
    assert failed == 0
