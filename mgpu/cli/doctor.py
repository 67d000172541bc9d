"""`mgpu doctor`."""
import click

from mgpu.cli import options as shared
from mgpu.cli.errors import Command
from mgpu.tools import doctor as examination


@click.command(cls=Command)
@shared.outputs("json", flag=True)
def doctor(outputs: shared.Outputs) -> None:
    """Check the environment.

    Prints versions, backends with the reason where one does not load,
    devices, threads and risky settings. Exit status 1 if the default backend
    does not load or a setting is invalid.
    """
    found = examination.diagnose()
    outputs.show(found, lambda: click.echo("\n".join(
        examination.lines(found))))
    outputs.say_written()
    click.get_current_context().exit(not examination.healthy(found))
