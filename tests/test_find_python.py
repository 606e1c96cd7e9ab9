"""`.ci/find_python` among stand-in Pythons, which run its real check as other versions would."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SHIM = """\
echo "pyenv: ${0##*/}: command not found" >&2
echo "The command exists in these Python versions: 3.9.1" >&2
exit 127
"""


def python(version: tuple[int, ...], without: str | None = None) -> str:
    """Body of a script that runs its `-c` argument as Python `version`, less the module
    `without`."""
    pretend = (
        f"import sys; sys.version_info = {version}; sys.modules[{without!r}] = None; "
        "sys.executable = sys.argv[1]; exec(sys.argv[3])"
    )
    return f"""exec '{sys.executable}' -c "{pretend}" "$0" "$@"\n"""


def install(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


class Machine:
    """A PATH of one folder and a home folder, both empty at first."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "a folder with spaces" / "bin"
        self.home = root / "home"
        self.bin.mkdir(parents=True)

    def search(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", ROOT / ".ci" / "find_python"],
            env={"PATH": str(self.bin), "HOME": str(self.home)} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def chosen(self, **environment: str) -> str:
        result = self.search(**environment)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout.removesuffix("\n")

    def refusal(self, **environment: str) -> str:
        result = self.search(**environment)
        assert (result.returncode, result.stdout) == (1, "")
        return result.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


GOOD = python((3, 13, 1))


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        # Shims that fail and old Pythons are passed over.
        ({"python3.13": SHIM, "python3.12": python((3, 11, 7)), "python3": GOOD}, "python3"),
        ({"python3.13": GOOD, "python3.12": GOOD, "python3": python((3, 14, 0))}, "python3.13"),
        # Pythons that cannot make environments are passed over as well.
        *(
            ({"python3.13": python((3, 13, 0), without=module), "python3": GOOD}, "python3")
            for module in ("venv", "ensurepip", "ssl", "ctypes")
        ),
    ],
)
def test_the_first_good_one_is_chosen(
    machine: Machine, pythons: dict[str, str], chosen: str
) -> None:
    paths = {name: install(machine.bin / name, body) for name, body in pythons.items()}
    assert machine.chosen() == paths[chosen]


@pytest.mark.parametrize("under_pyenv_root", [False, True])
def test_pyenvs_versions_are_searched_when_its_shims_fail(
    machine: Machine, tmp_path: Path, under_pyenv_root: bool
) -> None:
    pyenv = tmp_path / "opt" / "pyenv" if under_pyenv_root else machine.home / ".pyenv"
    for shim in ("python3.13", "python3.12", "python3"):
        install(machine.bin / shim, SHIM)
    for version in ((3, 9, 1), (3, 12, 1), (3, 13, 0)):
        name = ".".join(map(str, version))
        good = install(pyenv / "versions" / name / "bin" / "python", python(version))
    assert machine.chosen(**({"PYENV_ROOT": str(pyenv)} if under_pyenv_root else {})) == good


def test_refusal_tells_each_reason_once_and_what_to_install(machine: Machine) -> None:
    install(machine.bin / "python3.13", SHIM)
    install(machine.bin / "python3", python((3, 12, 3), without="ensurepip"))
    old = install(machine.home / ".pyenv/versions/3.9.1/bin/python", python((3, 9, 1)))
    message = machine.refusal(PYENV_ROOT=str(machine.home / ".pyenv"))
    assert "  python3.13: pyenv: python3.13: command not found\n" in message
    assert "  python3.12: not found\n" in message
    assert "  python3: it is Python 3.12 without the module ensurepip\n" in message
    assert message.count(f"  {old}: it is Python 3.9\n") == 1
    assert "apt install python3 python3-venv" in message


def test_named_python_is_used(machine: Machine) -> None:
    install(machine.bin / "python3.13", python((3, 13, 0)))
    mine = install(machine.bin / "mine", python((3, 14, 0)))
    assert machine.chosen(PYTHON="mine") == machine.chosen(PYTHON=mine) == mine


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (python((3, 11, 7)), "it is Python 3.11"),
        (python((2, 7, 18)), "it is Python 2.7"),
        (SHIM, "pyenv: mine: command not found"),
        ("exit 1\n", "it fails without a message"),
        ("exit 0\n", "it fails without a message"),
    ],
)
def test_unfit_named_python_is_an_error_even_beside_a_good_one(
    machine: Machine, body: str, reason: str
) -> None:
    install(machine.bin / "python3.13", python((3, 13, 0)))
    mine = install(machine.bin / "mine", body)
    assert machine.refusal(PYTHON=mine).startswith(
        f"PYTHON={mine} cannot be used:\n  {mine}: {reason}\n"
    )


def test_this_python_is_fit(machine: Machine) -> None:
    assert os.path.samefile(machine.chosen(PYTHON=sys.executable), sys.executable)


def test_minimum_version_is_the_projects(machine: Machine) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = map(int, project["requires-python"].removeprefix(">=").split("."))
    just_too_old = install(machine.bin / "older", python((major, minor - 1, 99)))
    just_enough = install(machine.bin / "enough", python((major, minor, 0)))
    assert machine.search(PYTHON=just_too_old).returncode == 1
    assert machine.chosen(PYTHON=just_enough) == just_enough
