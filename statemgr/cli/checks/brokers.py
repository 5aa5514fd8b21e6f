"""The brokers: reached, topics set right, a transaction published for real, the clock."""

from __future__ import annotations

from statemgr.cli.checks.finding import Finding, Status, guarded
from statemgr.config import JobConfig

#: Beyond this, times in checkpoint IDs and TTLs mislead people.
CLOCK_TOLERANCE_MS = 5_000


def check_brokers(config: JobConfig) -> list[Finding]:
    """Broker, topics, transaction and clock; what a missing broker makes pointless is left out."""
    from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
    from statemgr.local.clock import SystemClock, system_ids

    findings: list[Finding] = []
    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    with guarded("kafka", findings), TopicAdmin(config, SystemClock()) as admin:
        problems = admin.check(specs)
        servers = config.kafka_client("admin")["bootstrap.servers"]
        findings.append(Finding(check="kafka", status=Status.OK, detail=f"reached {servers}"))
        for problem in problems:
            findings.append(
                Finding(
                    check="topics",
                    status=Status.PROBLEM,
                    detail=f"{problem.topic}: {problem.message}",
                    fix=problem.fix_command,
                )
            )
        if not problems:
            names = ", ".join(spec.name for spec in specs)
            findings.append(Finding(check="topics", status=Status.OK, detail=names))
    if any(finding.check == "kafka" and finding.status is Status.PROBLEM for finding in findings):
        return findings
    with guarded("transaction", findings):
        from statemgr.kafka.temporary_topic import probe_transaction

        skew = probe_transaction(config, SystemClock(), system_ids())
        findings.append(Finding(check="transaction", status=Status.OK, detail="published one and read it back"))
        findings.append(clock_finding("the broker's", skew))
    return findings


def clock_finding(whose: str, skew_ms: int) -> Finding:
    """Whether a clock that is ``skew_ms`` ahead of this machine's is right enough."""
    if abs(skew_ms) <= CLOCK_TOLERANCE_MS:
        return Finding(check="clock", status=Status.OK, detail=f"{whose} clock and this machine's agree")
    direction = "ahead of" if skew_ms > 0 else "behind"
    return Finding(
        check="clock",
        status=Status.PROBLEM,
        detail=f"{whose} clock is {abs(skew_ms) / 1000:.0f} s {direction} this machine's",
        fix="synchronise the clocks (NTP); times in checkpoint IDs and TTLs are wrong until then",
    )
