"""The profile that a job means by a name: that of its namespace, or else that of the cluster."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from moejob_api.profiles.fields import API_VERSION, ProfileKind
from moejob_api.profiles.reading import TrainingProfile, read_profile_body
from moejob_client.api_client import ApiClient
from moejob_client.errors import Forbidden, NotFound, Retryable
from moejob_operator.logs import Log

log = Log(__name__)

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# A review waits no longer: the API server gives it 10 seconds, of which the validation may take most.
REVIEW_SECONDS = 2.0


async def find_profile(api: ApiClient, namespace: str, name: str) -> TrainingProfile | None:
    """Return the profile; the namespace's own hides the cluster's of that name. None where there is neither."""
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(namespace):
        # A review may come from anyone: no name leads to another path.
        return None
    paths = {
        ProfileKind.NAMESPACED: f"/apis/{API_VERSION}/namespaces/{namespace}/{ProfileKind.NAMESPACED.plural}/{name}",
        ProfileKind.CLUSTER: f"/apis/{API_VERSION}/{ProfileKind.CLUSTER.plural}/{name}",
    }
    for kind, path in paths.items():
        try:
            return read_profile_body(await api.get(path), kind)
        except NotFound:
            continue
        except Forbidden as error:
            # An operator of some namespaces may have no right to what belongs to the cluster.
            log.warning("profiles cannot be read", kind=kind, error=str(error))
    return None


@dataclass(frozen=True, slots=True)
class ProfileReader:
    """Reads profiles for reviews, which run in threads; the client belongs to the event loop."""

    api: ApiClient
    loop: asyncio.AbstractEventLoop

    def find(self, namespace: str, name: str) -> TrainingProfile | None:
        """Return the profile of that name; Retryable when there is no answer in time."""
        reading = asyncio.run_coroutine_threadsafe(find_profile(self.api, namespace, name), self.loop)
        try:
            return reading.result(REVIEW_SECONDS)
        except TimeoutError as late:
            reading.cancel()
            raise Retryable(f"profile {name} was not read within {REVIEW_SECONDS:g} seconds") from late
