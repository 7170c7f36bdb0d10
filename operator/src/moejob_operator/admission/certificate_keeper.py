"""Keeps the certificate of the admission webhook current."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from moejob_client.errors import AlreadyExists
from moejob_operator.admission.certificates import CertificateStore, KeyPair, load_pair, utc_now
from moejob_operator.cluster import Conflict, Forbidden, Retryable
from moejob_operator.logs import Log

log = Log(__name__)


def _new_tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@dataclass
class CertificateKeeper:
    """Loads the certificate into `context`. `makes_certificates` is asked at each check: only the leader makes any."""

    store: CertificateStore
    hosts: tuple[str, ...]
    makes_certificates: Callable[[], bool]
    on_loaded: Callable[[float], None]
    tick_seconds: float = 1.0
    check_seconds: float = 60.0
    context: ssl.SSLContext = field(default_factory=_new_tls_context)
    # Set once the context has a certificate.
    certified: asyncio.Event = field(default_factory=asyncio.Event)
    pair: KeyPair | None = field(default=None, init=False)

    async def run(self) -> NoReturn:
        """Look for another certificate now and then, for ever."""
        checked_as_leader, checked_at = False, float("-inf")
        while True:
            is_ours, now = self.makes_certificates(), asyncio.get_running_loop().time()
            # A new leader may find a certificate that a new webhook configuration does not trust yet.
            if self.pair is None or is_ours != checked_as_leader or now - checked_at >= self.check_seconds:
                checked_as_leader, checked_at = is_ours, now
                self._load_pair(await self._current_pair(is_ours=is_ours))
            await asyncio.sleep(self.tick_seconds)

    def _load_pair(self, pair: KeyPair | None) -> None:
        if pair is None or pair == self.pair:
            return
        load_pair(self.context, pair)
        self.on_loaded(pair.ends_at.timestamp())
        self.pair = pair
        self.certified.set()
        log.info("loaded a certificate for the webhook", ends=pair.ends_at.isoformat())

    async def _current_pair(self, *, is_ours: bool) -> KeyPair | None:
        try:
            if is_ours:
                return await self.store.ensure_certificate(self.hosts, utc_now())
            return await self.store.read()
        except (Conflict, AlreadyExists, Retryable) as error:
            log.info("the certificate was not looked at", error=str(error))
        except Forbidden as error:
            log.warning("the certificate is not ours to read; see the chart's role", error=str(error))
        return None
