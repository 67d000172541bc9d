"""The command line: the group `cli`, whose commands are loaded when they are
called.

==============  ============================================================
`reproduce`     the book's three chapters on several devices
`bench`         the speed of this machine
`demo`          what mgpu does, in half a minute
`doctor`        checks the environment
`launch`        a script in several processes
`compare`       `mgpu compare`, `mgpu trace` and `mgpu lint`
`gluon`         `mgpu inspect` and `mgpu convert`
`find`          networks, losses and data by name
`options`       options of several commands, and their parsers
`tables`        tables in the terminal
`errors`        errors in one line, with exit status 2
==============  ============================================================

Needs the packages click and, for all commands but `doctor`, rich.
`mgpu.__main__` reports a missing one.
"""
import importlib

import click

import mgpu
from mgpu.cli.errors import Group
from mgpu.cli.options import parse_devices
from mgpu.tools.chapters import differences

__all__ = ["cli", "differences", "parse_devices"]

#: the module of each command
_COMMANDS = {"bench": "bench", "compare": "compare", "convert": "gluon",
             "demo": "demo", "doctor": "doctor", "inspect": "gluon",
             "launch": "launch", "lint": "compare", "reproduce": "reproduce",
             "trace": "compare"}
#: former names of commands, which work and are not listed
_FORMER = {"parity": "compare"}


class _Lazy(Group):
    """Commands are loaded when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str
                    ) -> click.Command | None:
        name = _FORMER.get(name, name)
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"mgpu.cli.{_COMMANDS[name]}")
        return getattr(module, name)


@click.group(cls=_Lazy,
             context_settings={"help_option_names": ["-h", "--help"],
                               "max_content_width": 100,
                               "show_default": True})
@click.version_option(mgpu.__version__, prog_name="mgpu")
def cli() -> None:
    """One multi-device training API over MXNet/Gluon and PyTorch that gives
    the same numbers on both."""
