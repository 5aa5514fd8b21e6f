"""``statemgr doctor``: tries everything that the job needs, and says how to fix what fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from statemgr.config import JobConfig
from statemgr.health import checks
from statemgr.logs import counted
from statemgr.operations.doctor.backup_checks import check_backups
from statemgr.terminal.options import Call, job_options
from statemgr.terminal.output import console, print_json

_STYLES = {checks.Status.OK: "green", checks.Status.NOTE: "yellow", checks.Status.PROBLEM: "bold red"}


@click.command("doctor")
@job_options()
@click.option(
    "--group", "groups", multiple=True, help="Also check the rights on this consumer group. Repeatable.", metavar="NAME"
)
@click.option(
    "--fix",
    is_flag=True,
    help="Install the lifecycle rules that delete what failed commits leave behind and old versions of deleted blobs.",
)
def command(call: Call, groups: tuple[str, ...], fix: bool) -> None:
    """Check everything that the job needs; exit status 1 if something is wrong. Running jobs are not disturbed."""
    report = checks.Report(None if call.as_json else _show)
    examine(report, call.config, groups, fix=fix)
    problems = sum(finding.status is checks.Status.PROBLEM for finding in report.findings)
    if call.as_json:
        print_json([asdict(finding) for finding in report.findings])
    else:
        click.echo("what was checked is well" if not problems else counted(problems, "problem"))
    if problems:
        raise SystemExit(1)


def examine(report: checks.Report, config: JobConfig, groups: Sequence[str] = (), *, fix: bool = False) -> None:
    """Run all checks. They write a file, a temporary topic and a blob, and remove them."""
    checks.check_java(report)
    checks.check_disk(report, config)
    if checks.check_brokers(report, config) and checks.check_job(report, config, groups):
        check_backups(report, config)
    checks.check_blobs(report, config, fix=fix)
    checks.check_registry(report, config)


def _show(finding: checks.Finding) -> None:
    out = console()
    out.print(f"{finding.status:<8}", style=_STYLES[finding.status], end="")
    out.print(f"{finding.check:<15} {finding.detail}", markup=False, soft_wrap=True)
    if finding.fix:
        out.print(f"{'':<8}{'':<15} → {finding.fix}", markup=False, soft_wrap=True)
