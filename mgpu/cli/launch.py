"""`mgpu launch`: a script in several processes."""
import sys

import click
from click import Choice, FloatRange, IntRange, option

from mgpu import backends
from mgpu.cli.errors import Command
from mgpu.cli.options import Renamed
from mgpu.distributed import launch as starting


@click.command(cls=Command, context_settings={
    "ignore_unknown_options": False, "allow_interspersed_args": False})
@option("-n", "--nproc-per-node", "processes", type=IntRange(1), default=1,
        cls=Renamed, former=["--processes"],
        help="The number of processes on this machine.")
@option("--comm", type=Choice(["gloo", "kvstore", "torch"]), default=None,
        cls=Renamed, former=["--engine"], metavar="gloo|kvstore",
        help="The communication backend, which adds gradients over processes: "
        "gloo of torch.distributed, or MXNet's KVStore. Default: $MGPU_COMM, "
        "else gloo.")
@option("--backend", type=Choice([*backends.NAMES, *backends.ALIASES]),
        default=None, metavar="|".join(backends.NAMES),
        help="The backend of a script that chooses none. Default: "
        "$MGPU_BACKEND, else the one that is installed, mxnet where both "
        "are.")
@option("--max-restarts", type=IntRange(0), default=0, help="How often all "
        "processes are started again where one fails.")
@option("--nnodes", "machines", type=IntRange(1), default=1,
        help="The number of machines. Each runs this command.")
@option("--rdzv-endpoint", "rdzv", metavar="HOST:PORT", default=None,
        cls=Renamed, former=["--rdzv"], help="The rendezvous: an address of "
        "one of the machines, the same in all commands. Without it all "
        "sockets are bound to loopback.")
@option("--timeout", type=FloatRange(0, min_open=True), default=None,
        help="Seconds that a process may be silent, where the script does not "
        "say. Default: 300.")
@option("--start-timeout", type=FloatRange(0, min_open=True), default=300.0,
        help="Seconds within which all machines have to be there.")
@option("--log-dir", metavar="FOLDER", type=click.Path(file_okay=False),
        default=None, help="Where the output of each rank is kept. Default: "
        "a temporary folder, which is removed where all processes end well.")
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(ctx: click.Context, script: str, arguments: tuple[str, ...],
           **options: object) -> None:
    """Run SCRIPT in several processes that train one network.

    In the script one line is new: mgpu.distributed.init(). The output of
    rank 0 is shown. Status: 0 where all processes end well, 1 where one does
    not or has not called init, 128 + the signal after Ctrl-C or SIGTERM. See
    docs/guide/processes.md.
    """
    status = starting.launch(script, arguments,
                             **options)     # type: ignore[arg-type]
    sys.stdout.flush()
    ctx.exit(status)
