"""The path of reports on publications: what all workers of an engine say of the weights that they were sent."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from moejob_api.contract.publications import PublicationReport
from moejob_rollout.asgi import Reply, Scope, Send


async def report_publication(scope: Scope, send: Send) -> None:
    """Ask each worker, and answer with one report."""
    client = scope["app"].state.engine_client
    answers = await client.collective_rpc("report_publication")
    report = merge_reports([PublicationReport.model_validate(answer) for answer in answers])
    await Reply(send, keeps_open=True)(HTTPStatus.OK, report.model_dump_json())


def merge_reports(reports: Iterable[PublicationReport]) -> PublicationReport:
    """Return what at least one worker reports, each tensor once; pure."""
    report_fields = {
        field: tuple(dict.fromkeys(name for report in reports for name in getattr(report, field)))
        for field in PublicationReport.model_fields
    }
    return PublicationReport(**report_fields)
