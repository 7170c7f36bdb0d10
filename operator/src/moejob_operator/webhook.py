"""Runs the admission webhook: over TLS, with whatever certificate is right at the time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from moejob_operator.admission import tls
from moejob_operator.api_client import Exists
from moejob_operator.certificates import CertificateStore, KeyPair, load, utc_now
from moejob_operator.cluster import Conflict, Forbidden, Retryable
from moejob_operator.logs import Log

log = Log(__name__)


@dataclass
class Webhook:
    """Serves from when there is a certificate on. `makes_certificates` is asked each time: only the leader does."""

    app: web.Application
    store: CertificateStore
    hosts: tuple[str, ...]
    port: int
    makes_certificates: Callable[[], bool]
    loaded: Callable[[float], None]
    # All addresses of this machine.
    host: str | None = None
    tick_seconds: float = 1.0
    check_seconds: float = 60.0
    pair: KeyPair | None = field(default=None, init=False)
    # Which port it has become; the one asked for, unless that was 0.
    served_port: int | None = field(default=None, init=False)

    async def run(self) -> None:
        """Serve for ever, and look for another certificate now and then."""
        context = tls()
        runner = web.AppRunner(self.app, access_log=None)
        await runner.setup()
        looked_as_leader, looked_at = False, float("-inf")
        try:
            while True:
                is_ours, now = self.makes_certificates(), asyncio.get_running_loop().time()
                # A new leader may find a certificate that a new webhook configuration does not trust yet.
                if self.pair is None or is_ours != looked_as_leader or now - looked_at >= self.check_seconds:
                    looked_as_leader, looked_at = is_ours, now
                    await self._serve(await self._current(is_ours=is_ours), context, runner)
                await asyncio.sleep(self.tick_seconds)
        finally:
            await runner.cleanup()

    async def _serve(self, pair: KeyPair | None, context: ssl.SSLContext, runner: web.AppRunner) -> None:
        if pair is None or pair == self.pair:
            return
        load(context, pair)
        self.loaded(pair.ends.timestamp())
        if self.pair is None:
            await web.TCPSite(runner, self.host, self.port, ssl_context=context).start()
            self.served_port = runner.addresses[0][1]
        self.pair = pair
        log.info("serving the webhook", port=self.served_port, certificate_ends=pair.ends.isoformat())

    async def _current(self, *, is_ours: bool) -> KeyPair | None:
        try:
            if is_ours:
                return await self.store.keep(self.hosts, utc_now())
            return await self.store.read()
        except (Conflict, Exists, Retryable) as error:
            log.info("the certificate was not looked at", error=str(error))
        except Forbidden as error:
            log.warning("the certificate is not ours to read; see the chart's role", error=str(error))
        return None
