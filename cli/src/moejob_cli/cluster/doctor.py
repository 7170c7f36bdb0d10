"""The lines of `moejob doctor`: each check with its result, and the fix where one is needed."""

from __future__ import annotations

from typing import Any

import typer

from moejob_api.contract.texts import escaped_text
from moejob_cli.exits import CommandExit
from moejob_client.cluster_checks import CheckFinding, CheckResult
from moejob_client.jobs import AsyncClient

_WANTING = (CheckResult.WARNING, CheckResult.FAILED)


async def print_findings(jobs: AsyncClient) -> CommandExit:
    """Print each finding as soon as it is known."""
    exit_code = CommandExit.ACCEPTED
    async for finding in jobs.check_cluster():
        typer.echo(_finding_text(finding))
        exit_code = max(exit_code, _finding_exit(finding))
    return exit_code


async def findings_document(jobs: AsyncClient) -> tuple[dict[str, Any], CommandExit]:
    """Return all findings as plain values, and the exit code."""
    findings = [finding async for finding in jobs.check_cluster()]
    rows = [
        {"check": each.check, "result": each.result.value, "message": each.message, "fix": each.fix}
        for each in findings
    ]
    return {"namespace": jobs.namespace, "checks": rows}, max(map(_finding_exit, findings))


def _finding_exit(finding: CheckFinding) -> CommandExit:
    return CommandExit.REFUSED if finding.result in _WANTING else CommandExit.ACCEPTED


def _finding_text(finding: CheckFinding) -> str:
    fix = f"; {finding.fix}" if finding.fix else ""
    return f"{finding.result:<8} {finding.check:<11} {escaped_text(finding.message + fix)}"
