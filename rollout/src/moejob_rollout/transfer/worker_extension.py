"""Methods that vLLM adds to its workers, so that a server can ask all of them at once."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """A base that vLLM gives its class of workers."""

    weight_transfer_engine: Any

    def report_publication(self) -> dict[str, Any]:
        """Return a PublicationReport on this worker's part of the model, as JSON has it."""
        report: dict[str, Any] = self.weight_transfer_engine.report_publication().model_dump(mode="json")
        return report
