"""``statemgr doctor``: tries everything that the job needs, and says how to fix what fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import click

from statemgr.cli.checks import Finding, Status
from statemgr.cli.checks.blobs import check_blobs
from statemgr.cli.checks.brokers import check_brokers
from statemgr.cli.checks.job import check_job
from statemgr.cli.checks.local import check_disk, check_java
from statemgr.cli.options import json_option, with_config
from statemgr.cli.output import console, print_json
from statemgr.config import JobConfig

_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


@click.command("doctor")
@with_config
@json_option
@click.option(
    "--group", "groups", multiple=True, help="Also check the rights on this consumer group. Repeatable.", metavar="NAME"
)
@click.option("--fix", is_flag=True, help="Install the lifecycle rule that deletes what failed commits leave behind.")
def command(config: JobConfig, as_json: bool, groups: tuple[str, ...], fix: bool) -> None:
    """Check everything that the job needs; exit status 1 if something is wrong. Running jobs are not disturbed."""
    findings: list[Finding] = []
    checks: list[Callable[[], list[Finding]]] = [
        check_java,
        lambda: check_disk(config),
        lambda: check_brokers(config),
        lambda: check_job(config, groups) if _reached(findings) else [],
        lambda: check_blobs(config, fix=fix),
    ]
    for check in checks:
        found = check()
        findings += found
        if not as_json:
            _show(found)
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    if as_json:
        print_json([{**asdict(finding), "status": str(finding.status)} for finding in findings])
    else:
        click.echo("all is well" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
    if problems:
        raise SystemExit(1)


def _reached(findings: list[Finding]) -> bool:
    """Whether there are brokers to ask."""
    return not any(finding.check == "kafka" and finding.status is Status.PROBLEM for finding in findings)


def _show(findings: list[Finding]) -> None:
    out = console()
    for finding in findings:
        out.print(f"{finding.status:<8}", style=_STYLES[finding.status], end="")
        out.print(f"{finding.check:<15} {finding.detail}", markup=False, soft_wrap=True)
        if finding.fix:
            out.print(f"{'':<8}{'':<15} → {finding.fix}", markup=False, soft_wrap=True)
