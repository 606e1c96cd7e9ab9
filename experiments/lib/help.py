"""What --help shows: a program's flags in groups."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from absl import app, flags

OWN = "program"  # the group of flags that are in no other


@contextmanager
def group(title: str) -> Iterator[None]:
    """Flags that are defined in this context are one group of --help; inner groups stay apart."""
    before = set(flags.FLAGS)
    yield
    # absl's help lists key flags by module: a group is registered as if it were a module.
    grouped = {flag.name for one in flags.FLAGS.key_flags_by_module_dict().values() for flag in one}
    for name in set(flags.FLAGS) - before - grouped:
        flags.FLAGS.register_key_flag_for_module(title, flags.FLAGS[name])


class Help(app.HelpFlag):
    """In place of absl's --help, which knows no groups and has exit status 1."""

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
