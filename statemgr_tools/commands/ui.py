"""``statemgr ui``: a web page over the checkpoint topic and the blob store. Reads only; fences nobody."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack, closing

import click

from statemgr.config import JobConfig
from statemgr.terminal.options import DEFAULT_FILE, json_option, metrics_option, overrides
from statemgr.terminal.output import print_json, say

_PORT = 8640


def _names(_context: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """An option's host names, as a Host header has them without its port."""
    for name in names:
        if "/" in name or (":" in name and not (name.startswith("[") and name.endswith("]"))):
            raise click.BadParameter(f"{name!r} is no host name: leave out the scheme and the port; IPv6 is [ADDRESS]")
    return names


@click.command("ui", short_help="Serve a read-only web page about jobs.")
@click.option(
    "--config",
    "-c",
    "files",
    multiple=True,
    default=(DEFAULT_FILE,),
    show_default=True,
    type=click.Path(),
    help="Configuration file of a job. Repeatable.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key for this run. Repeatable.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    callback=_names,
    metavar="NAME",
    help="Also answer requests for this host name. Repeatable.",
)
@metrics_option
@click.option(
    "--most-bytes",
    default=1 << 30,
    show_default=True,
    type=click.IntRange(min=0),
    help="Do not restore a store with more bytes for a look-up.",
)
@json_option
def command(
    files: tuple[str, ...],
    settings: tuple[str, ...],
    host: str,
    port: int,
    hosts: tuple[str, ...],
    metrics: tuple[str, ...],
    most_bytes: int,
    as_json: bool,
) -> None:
    """Serve a read-only web page about jobs, until Ctrl-C. The jobs may be running.

    The page shows tasks with lag, age, stage and owner; checkpoints; keys and values of stores; blobs. It has no
    password: whoever reaches the port can read the state of the jobs. --json prints the address as JSON.
    """
    from statemgr_tools.ui.model import JobView
    from statemgr_tools.ui.server import LOOPBACK, Application, make

    configs = [JobConfig.from_file(file, overrides(settings)) for file in files]
    host = host.strip("[]")
    own = f"[{host}]" if ":" in host else host
    with ExitStack() as stack:
        jobs = {config.job_name for config in configs}
        views = [stack.enter_context(closing(JobView(config, metrics, most_bytes, jobs))) for config in configs]
        for view in views:
            view.history.start()
        server = stack.enter_context(make(host, port, Application(views, {*LOOPBACK, own, *hosts})))
        address = f"http://{own}:{server.server_port}/"
        if as_json:
            print_json({"address": address})
        else:
            click.echo(address)
        if own not in LOOPBACK:
            say(f"note: everybody who reaches {own} can read the state of the jobs", style="yellow")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
