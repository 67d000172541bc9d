"""Errors of commands: one line on standard error, with exit status 2.

Status 1 is a result: a comparison has found a difference (see `STATUS`),
`mgpu lint` has findings, or `mgpu doctor` has found a fault. The status is 130
after Ctrl-C, and 141 after a broken pipe (``mgpu inspect FILE | head``).
"""
import contextlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click

from mgpu import backends

#: arguments of the Python API whose option has another name
_ALIASES = {"batches": "--data", "num_epochs": "--epochs", "root": "--data",
            "rules": "--map", "sample": "--input", "shape": "--input",
            "test": "--data"}
#: errors of these kinds say what to do when they come from mgpu
_EXPLAINED = (ValueError, ImportError, OSError, FloatingPointError)


#: the status that a shell gives for a closed pipe
_PIPE = 141
#: the exit status of each verdict, in every command that compares
STATUS = {
    "same": 0, "exact": 0,
    "same but for MXNet's float32": 1, "same but for named formulas": 1,
    "same but for named formulas, and MXNet's float32": 1,
    "different": 1, "wrong": 1, "batch statistics": 1,
    "no proof": 2, "not compared": 2}


def exit_status(found: Any, *, allow_mxnet_float32: bool = False,
                allow_formulas: bool = False) -> int:
    """The exit status of a `mgpu.parity.Result` or `InvarianceReport`: that
    of its verdict in `STATUS`, or 0 where the verdict is "same but for" what
    is allowed."""
    if found.verdict.startswith("same but for") \
            and found.proves(allow_mxnet_float32, allow_formulas):
        return 0
    return STATUS[found.verdict]


class CommandError(click.ClickException):
    """The error of a command, with exit status 2."""

    exit_code = 2


def _usage(ctx: click.Context, error: click.UsageError) -> CommandError:
    message = " ".join(error.format_message().split())
    return CommandError(f"{message} See {ctx.command_path} --help.")


class Group(click.Group):
    """A group whose error for an unknown command is one line."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise _usage(ctx, error) from error


class Command(click.Command):
    """A command that ends as described above, with an option
    ``--traceback``. Its context knows the arguments as they were typed, as
    ``ctx.meta["mgpu.command"]``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(click.Option(
            ["--traceback"], is_flag=True, expose_value=False, is_eager=True,
            callback=lambda ctx, _, value: ctx.meta.update(
                {"mgpu.traceback": value}),
            help="Show where an error comes from."))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["mgpu.command"] = f"{ctx.command_path} {shlex.join(args)}"
        with self._one_line_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with self._one_line_errors(ctx):
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _one_line_errors(self, ctx: click.Context) -> Iterator[None]:
        try:
            yield
        except click.UsageError as error:
            raise _usage(ctx, error) from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort) as error:
            click.echo("Aborted!", err=True)    # click would return 1
            raise click.exceptions.Exit(130) from error
        except SystemExit as error:
            # rich exits so on a broken pipe
            if isinstance(error.__context__, BrokenPipeError):
                raise click.exceptions.Exit(_PIPE) from error
            # Its status would be taken for an answer.
            raise CommandError(
                "code of yours that a command runs returns to it; received "
                f"sys.exit({error.code!r}). Put the part of the script that "
                'ends the program under if __name__ == "__main__":.'
                ) from error
        except BrokenPipeError as error:
            # What is left in the buffer fails no more.
            with contextlib.suppress(OSError):      # it is no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(_PIPE) from error
        except Exception as error:
            if ctx.meta.get("mgpu.traceback"):
                traceback.print_exc()
            # A MatchError has a line for each tensor that fits no other.
            shape = ctx.params.get("input")
            raise CommandError(self._in_options(
                str(error) if hasattr(error, "candidates")
                else _one_line(error, shape and "x".join(map(str, shape))))
                ) from error

    def _in_options(self, text: str) -> str:
        """`text` with ``--batch-size`` where it says ``batch_size=`` or, at
        its beginning, ``batch_size must be``."""
        own = {key: name for param in self.params
               for name in param.opts if name.startswith("--")
               for key in (name[2:].replace("-", "_"), param.name)}
        options = {**{name: option for name, option in _ALIASES.items()
                      if option in own.values()}, **own}

        def option(found: re.Match[str]) -> str:
            if found[1] not in options:
                return found[0]
            return options[found[1]] + (" " + found[2] if found[2] else "")
        chosen = "write --backend " if "backend" in own \
            else "set MGPU_BACKEND="
        text = re.sub(r"switch with mgpu\.set_backend\('(\w+)'\)",
                      rf"{chosen}\1", text)
        text = re.sub(r"(?<![\w-])(\w+)=([\w'\"(\[{])?", option, text)
        return re.sub(r"^(\w+)()(?= must be )", option, text)


#: what precedes the words of an error of MXNet: operator, time, place and
#: condition in its source
_PLACE = re.compile(
    r"(?:Error in operator \S+ )?\[[\d:]+\] \S+\.(?:cc|cu|h):\d+: "
    r"(?:Check failed: .*? : ?)?")
#: what to do about errors of the system
_CURES = {FileNotFoundError: "Correct the path.",
          PermissionError: "Change its permissions, or name another file."}


def _of_framework(error: BaseException) -> bool:
    """Whether a framework has raised `error`; mgpu may have called it from
    inside one of its layers."""
    roots = [frame.f_globals.get("__name__", "").partition(".")[0]
             for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, _EXPLAINED):
        roots = roots[-1:]
    return any(entry.framework in roots for entry in backends.ENTRIES.values())


def _one_line(error: Exception, shape: str | None = None) -> str:
    """The message for an error. mgpu's own errors have the fix. An error of
    a framework, which may be pages, is shortened to its main line. Examples
    of the wrong `shape` may be the reason."""
    text = _PLACE.sub("", str(error))
    if isinstance(error, OSError) and error.errno and error.filename:
        text = " ".join([f"{error.strerror}: {error.filename!r}.",
                         *filter(None, [_CURES.get(type(error))])])
    if not isinstance(error, _EXPLAINED) or _of_framework(error):
        name = type(error).__name__
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        line = next((line for line in lines if line.startswith(name)),
                    f"{name}: {lines[-1]}")
        if shape and _of_framework(error):
            line = (f"{line.rstrip('.')}. Check that the network takes "
                    f"examples of --input {shape}")
        text = line + " (--traceback shows where)"
    return " ".join(text.split())
