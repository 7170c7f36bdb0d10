"""A program in a running container, over the WebSocket of the API server: its output as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import aiohttp
import orjson

from moejob_api import api_bodies
from moejob_client.api_client import ApiClient
from moejob_client.errors import Retryable

# The first byte of a message names its stream.
_OUTPUT, _ERRORS, _STATUS = 1, 2, 3
_SHOWN_CHARACTERS = 500


class ProgramError(Exception):
    """A program in a pod failed; the message has the end of its standard error."""


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that may be entered."""

    namespace: str
    pod: str
    name: str


async def run_program(http: ApiClient, container: RunningContainer, command: Sequence[str]) -> AsyncGenerator[bytes]:
    """Yield the standard output of a program; ProgramError if it fails, Retryable if the connection breaks."""
    path = f"/api/v1/namespaces/{container.namespace}/pods/{container.pod}/exec"
    query = [("container", container.name), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in command]
    errors = b""
    async with http.open_websocket(f"{path}?{urlencode(query)}") as socket:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            stream, content = message.data[0], message.data[1:]
            if stream == _OUTPUT and content:
                yield content
            elif stream == _ERRORS:
                errors = (errors + content)[-_SHOWN_CHARACTERS:]
            elif stream == _STATUS:
                _check_status(content, errors)
                return
    # Without a status it is unknown whether all of the output has come.
    raise Retryable(f"the connection to {container.pod} broke before its program had ended")


def _check_status(content: bytes, errors: bytes) -> None:
    try:
        status = api_bodies.as_mapping(orjson.loads(content))
    except ValueError:
        status = {}
    if status.get("status") != "Success":
        words = errors.decode(errors="replace").strip() or api_bodies.as_text(status.get("message"))
        raise ProgramError(words or "the program ended without a reason")
