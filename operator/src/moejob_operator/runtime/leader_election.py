"""Leader election by a Lease of coordination.k8s.io/v1: who leads, and until when at most.

One inequality makes it safe, even if clocks disagree: a leader may act for `renew_deadline_seconds`, counted from just
before it sent its last successful renewal. A follower takes over no sooner than `lease_seconds` after it saw the same
renewal, which is later. Each measures on its own clock; the times written into the Lease are for people.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, assert_never

from moejob_client.api_client import ApiClient
from moejob_client.errors import AlreadyExists, NotFound
from moejob_operator.cluster import Conflict, Forbidden, Raw, Retryable
from moejob_operator.logs import Log

log = Log(__name__)

# Monotonic clocks of Linux stand still while the machine sleeps; this one continues, as the followers' clocks do.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_clock() -> float:
    """Return the seconds of a clock that cannot be set and counts the machine's sleep."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class LeaseDurations:
    """The durations of an election.

    A follower leads at most `lease_seconds + look_seconds` after the leader was last heard.
    """

    lease_seconds: int = 13
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0
    look_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Lease:
    """The Lease as it was read."""

    holder: str
    seconds: int
    transitions: int
    version: str

    @classmethod
    def from_body(cls, raw: Raw) -> Lease:
        """Read the Lease from an API object; missing fields mean that no replica holds it."""
        spec: Mapping[str, Any] = raw.get("spec") or {}
        return cls(
            holder=spec.get("holderIdentity") or "",
            seconds=spec.get("leaseDurationSeconds") or 0,
            transitions=spec.get("leaseTransitions") or 0,
            version=raw["metadata"]["resourceVersion"],
        )


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """A Lease (None: there is none) and since when, by our own clock, it has been like this."""

    lease: Lease | None
    since_time: float


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Put our name into the Lease as it was read, or create it where there is none."""

    existing: Lease | None


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew the Lease, which is ours."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class WaitForLease:
    """Wait: another replica leads until then, unless it releases the Lease before."""

    until: float


Move = AcquireLease | RenewLease | WaitForLease


def observe_lease(before: LeaseObservation | None, lease: Lease | None, now: float) -> LeaseObservation:
    """Return the observation of a Lease as read: an unchanged Lease keeps the time when it was first seen."""
    if before is not None and before.lease == lease:
        return before
    return LeaseObservation(lease, now)


def next_move(observation: LeaseObservation, identity: str, durations: LeaseDurations, now: float) -> Move:
    """Return the next move of a candidate, by the Lease as it saw it."""
    lease = observation.lease
    if lease is None or not lease.holder:
        return AcquireLease(lease)
    if lease.holder == identity:
        return RenewLease(lease)
    # A longer lease, as an older or newer release may write it, stays valid.
    until = observation.since_time + max(lease.seconds, durations.lease_seconds)
    return AcquireLease(lease) if now >= until else WaitForLease(until)


def lease_spec(durations: LeaseDurations, identity: str, existing: Lease | None, now: datetime) -> dict[str, Any]:
    """The spec to write: with our name, over the Lease as it was read."""
    is_ours = existing is not None and existing.holder == identity
    spec: dict[str, Any] = {
        "holderIdentity": identity,
        "leaseDurationSeconds": durations.lease_seconds,
        "renewTime": _micro_time(now),
        "leaseTransitions": (existing.transitions if existing else 0) + (0 if is_ours or existing is None else 1),
    }
    return spec if is_ours else spec | {"acquireTime": _micro_time(now)}


class LeaseStore(Protocol):
    """The store of the Lease. Conflict: it changed since it was read."""

    async def read(self) -> Raw | None:
        """The Lease; None when there is none."""

    async def create(self, spec: Mapping[str, Any]) -> Raw:
        """Create it; Conflict when another replica did."""

    async def write(self, spec: Mapping[str, Any], version: str) -> Raw:
        """Lay fields over the Lease of exactly this version."""


class Leadership(Protocol):
    """The leadership of this process."""

    def remaining_seconds(self) -> float:
        """Return for how many seconds this process certainly leads; it may act only above zero."""

    def stop(self) -> None:
        """Lead no more once the work in hand has ended, and campaign no more."""

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Run `lead` whenever this process leads, until stopped."""


class SoleReplica:
    """The only replica there is: it leads from the start."""

    def remaining_seconds(self) -> float:
        """For ever."""
        return float("inf")

    def stop(self) -> None:
        """Its work ends by itself."""

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Lead."""
        await lead()


class Election:
    """Runs for leader, and runs the leader's work while, and only while, that is certain."""

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        durations: LeaseDurations,
        clock: Callable[[], float] = boot_clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._identity = identity
        self._durations = durations
        self._clock = clock
        self._chance = chance
        self._observation: LeaseObservation | None = None
        self._leads_until = float("-inf")
        self._is_stopping = asyncio.Event()

    def remaining_seconds(self) -> float:
        """Return the renewal deadline less the time since the last renewal was sent; -inf without a renewal."""
        return self._leads_until - self._clock()

    def stop(self) -> None:
        """Lead no more once the work in hand has ended, and campaign no more."""
        self._is_stopping.set()

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Campaign and lead until stopped. `lead` is cancelled when the Lease may be lost, and returns when stopped."""
        while not self._is_stopping.is_set():
            if await self._try_to_lead():
                await self._lead_while_certain(lead)
            else:
                await self._wait_turn()

    async def _wait_turn(self) -> None:
        seconds = self._durations.look_seconds * (0.8 + 0.2 * self._chance())
        if self._observation is not None:
            match next_move(self._observation, self._identity, self._durations, self._clock()):
                case WaitForLease(until):
                    # Wake up exactly then: a longer wait would be time without a leader.
                    seconds = min(seconds, max(0.0, until - self._clock()))
                case AcquireLease() | RenewLease():
                    pass
        try:
            async with asyncio.timeout(seconds):
                await self._is_stopping.wait()
        except TimeoutError:
            return

    async def _try_to_lead(self) -> bool:
        """Read the Lease and make the next move; return whether this process leads now."""
        try:
            async with asyncio.timeout(self._durations.renew_deadline_seconds / 2):
                match next_move(await self._read_lease(), self._identity, self._durations, self._clock()):
                    case WaitForLease():
                        return False
                    case AcquireLease(existing):
                        await self._put_lease(existing)
                    case RenewLease(lease):
                        await self._put_lease(lease)
                    case unexpected:
                        assert_never(unexpected)
        except (Conflict, Retryable, TimeoutError) as error:
            log.debug("no word about the lease", error=str(error))
            return False
        except Forbidden as error:
            log.warning("the lease is not ours to touch; grant get, create and patch on it", error=str(error))
            return False
        return True

    async def _put_lease(self, existing: Lease | None) -> None:
        # Before sending: the others count from when it was stored, which is later.
        sent_at = self._clock()
        spec = lease_spec(self._durations, self._identity, existing, datetime.now(UTC))
        raw = await (self._store.create(spec) if existing is None else self._store.write(spec, existing.version))
        self._observation = observe_lease(self._observation, Lease.from_body(raw), self._clock())
        self._leads_until = sent_at + self._durations.renew_deadline_seconds

    async def _lead_while_certain(self, lead: Callable[[], Awaitable[None]]) -> None:
        log.info("leading", identity=self._identity)
        work = asyncio.ensure_future(lead())
        renewals = asyncio.ensure_future(self._keep_renewing())
        try:
            # The clock decides that time is up, not the renewals: they may hang in a call to a silent API server.
            while not work.done() and not renewals.done() and self.remaining_seconds() > 0:
                await asyncio.wait(
                    {work, renewals}, timeout=self.remaining_seconds(), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            if not work.done():
                # Before the cancellation, so that work that ends slowly can write nothing.
                self._leads_until = float("-inf")
            renewals.cancel()
            work.cancel()
            await asyncio.wait({work, renewals})
            self._leads_until = float("-inf")
        if work.cancelled():
            log.warning("not leading any more: the lease was taken, or could not be renewed in time")
            return
        await self._release_lease()
        work.result()

    async def _keep_renewing(self) -> None:
        """Renew for as long as no other replica has the Lease."""
        while (lease := self._held_lease()) is not None:
            await asyncio.sleep(self._durations.retry_seconds)
            try:
                async with asyncio.timeout(self._durations.renew_deadline_seconds / 2):
                    await self._renew_once(lease)
            except (Conflict, Retryable, TimeoutError, Forbidden) as error:
                log.warning("the lease was not renewed", error=repr(error), left_seconds=self.remaining_seconds())

    async def _renew_once(self, lease: Lease) -> None:
        try:
            await self._put_lease(lease)
        except Conflict:
            # Still ours where only the reply to a renewal was lost; another's after too long a sleep of this process.
            await self._read_lease()
            if (present_lease := self._held_lease()) is not None:
                await self._put_lease(present_lease)

    async def _read_lease(self) -> LeaseObservation:
        raw = await self._store.read()
        self._observation = observe_lease(
            self._observation, None if raw is None else Lease.from_body(raw), self._clock()
        )
        return self._observation

    def _held_lease(self) -> Lease | None:
        """The Lease as last seen, when it is ours."""
        lease = self._observation.lease if self._observation is not None else None
        return lease if lease is not None and lease.holder == self._identity else None

    async def _release_lease(self) -> None:
        """Give the Lease up, so that a follower need not wait for its end."""
        lease = self._held_lease()
        if lease is None:
            return
        try:
            async with asyncio.timeout(self._durations.retry_seconds):
                await self._store.write({"holderIdentity": None, "leaseDurationSeconds": 1}, lease.version)
        except (Conflict, Retryable, Forbidden, TimeoutError) as error:
            log.warning("the lease was not released: a follower will wait for its end", error=str(error))
            return
        log.info("released the lease", identity=self._identity)


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class ApiLeaseStore:
    """A Lease in the API server. `api` serves no other part: no other request may delay a renewal."""

    api: ApiClient
    namespace: str
    name: str

    async def read(self) -> Raw | None:
        """GET the Lease; NotFound becomes None."""
        try:
            return await self.api.get(f"{self._leases_path}/{self.name}")
        except NotFound:
            return None

    async def create(self, spec: Mapping[str, Any]) -> Raw:
        """POST the Lease; AlreadyExists becomes Conflict."""
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        }
        try:
            # The reply has the metadata only; the spec is as it was sent.
            return {**await self.api.create(self._leases_path, lease), "spec": spec}
        except AlreadyExists as exists:
            raise Conflict(str(exists)) from exists

    async def write(self, spec: Mapping[str, Any], version: str) -> Raw:
        """PATCH the Lease of exactly this version; a Lease that is gone is a Conflict, too."""
        try:
            return await self.api.patch(
                f"{self._leases_path}/{self.name}", {"metadata": {"resourceVersion": version}, "spec": spec}
            )
        except NotFound as absent:
            raise Conflict(str(absent)) from absent

    @property
    def _leases_path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
