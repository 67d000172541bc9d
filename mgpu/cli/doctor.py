"""`mgpu doctor`."""
import click

from mgpu.cli.errors import Command
from mgpu.tools import doctor as examination


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Tell whether this machine is fit.

    Shows versions, backends and why one does not load, devices, threads, and
    risky settings. Exit status 1 if the default backend does not load or a
    setting is wrong.
    """
    click.get_current_context().exit(
        examination.report(as_json, click.echo))
