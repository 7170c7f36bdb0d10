"""Engines that end soon after every start: decides when another start is of no use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.contract.pods import ExitCode, printable_text

# A working engine takes a minute to start. If an engine ran for this long, its start has not failed.
STARTED_SECONDS = 120.0
# The first starts may lack memory that ranks are about to give back.
STARTS = 5
# Bytes read from the end of a log, enough for its last line.
LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class EngineStarts:
    """The failed starts of one engine, in a row."""

    failed: int = 0
    exit_code: int = 0

    def after_end(self, exit_code: int, ran_seconds: float) -> EngineStarts:
        """Count one more end."""
        if ran_seconds >= STARTED_SECONDS:
            return EngineStarts()
        return EngineStarts(self.failed + 1, exit_code)

    @property
    def is_misconfigured(self) -> bool:
        """Return whether the engine itself says that no start can help."""
        return self.failed > 0 and self.exit_code == ExitCode.BAD_CONFIGURATION

    @property
    def is_hopeless(self) -> bool:
        """Return whether the job cannot go on with this engine: it would wait for the engine for ever."""
        return self.is_misconfigured or self.failed >= STARTS

    def refusal_message(self, engine: int, log: bytes) -> str:
        """Return the sentence that the job ends with, given the end of the engine's log."""
        lines = (printable_text(line).strip() for line in reversed(log.decode(errors="replace").splitlines()))
        last_line = next(filter(None, lines), "it wrote nothing; see the log of its pod")
        if self.is_misconfigured:
            return f"engine {engine} cannot start: {last_line}"
        count_text = f"ended {self.failed} times within {STARTED_SECONDS:.0f} s of its start"
        return f"engine {engine} {count_text}, last with exit code {self.exit_code}: {last_line}"
