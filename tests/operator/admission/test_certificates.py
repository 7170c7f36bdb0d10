"""The webhook's certificate: what it is good for, when it is replaced, and that it is trusted first."""

from __future__ import annotations

import asyncio
import base64
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from moejob_operator.admission.certificates import (
    LIFETIME,
    RENEWAL,
    CertificateStore,
    KeyPair,
    is_fit,
    load_pair,
    make_pair,
    read_pair,
    service_hosts,
)
from moejob_operator.cluster import Forbidden
from stand_in_api import RecordedRequest, StandInServer, refusal_answer, serve_stand_in

NOW = datetime.now(UTC).replace(microsecond=0)
HOSTS = service_hosts("moejob-webhook", "moejob-system")
SECRETS = "/api/v1/namespaces/moejob-system/secrets"
SECRET = f"{SECRETS}/certificate"
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/moejob"


def secret(pair: KeyPair, **changes: str | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "tls.crt": encoded(pair.certificate), "tls.key": encoded(pair.key), "ca.crt": encoded(pair.authority),
    }  # fmt: skip
    return {"metadata": {"resourceVersion": "5"}, "data": data | changes}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def hooks(*bundles: str) -> dict[str, Any]:
    return {
        "webhooks": [{"name": f"hook-{i}", "clientConfig": {"caBundle": bundle}} for i, bundle in enumerate(bundles)]
    }


def reply_to(asked: RecordedRequest) -> bytes:
    """Return what the API server was made to trust."""
    return base64.b64decode(asked.body["webhooks"][0]["clientConfig"]["caBundle"])


# --- one pair -------------------------------------------------------------------------------------------------------


def test_a_certificate_is_for_the_names_of_the_service_and_lasts_a_year() -> None:
    pair = make_pair(HOSTS, NOW)
    assert pair.hosts == HOSTS
    assert HOSTS[0] == "moejob-webhook.moejob-system.svc"
    assert pair.ends_at == NOW + LIFETIME


async def shaken(server: KeyPair, trusted: bytes, host: str) -> None:
    """A TLS connection as an API server opens it."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(serving, server)
    calling = ssl.create_default_context(cadata=trusted.decode())
    calling.verify_flags |= ssl.VERIFY_X509_STRICT

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(close, "127.0.0.1", 0, ssl=serving)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=calling, server_hostname=host)
        writer.close()


@pytest.mark.parametrize("host", HOSTS)
def test_who_trusts_its_authority_can_connect(host: str) -> None:
    pair = make_pair(HOSTS, NOW)
    asyncio.run(shaken(pair, pair.authority, host))


def test_who_trusts_another_authority_or_wants_another_name_cannot() -> None:
    pair = make_pair(HOSTS, NOW)
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(shaken(pair, make_pair(HOSTS, NOW).authority, HOSTS[0]))
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(shaken(pair, pair.authority, "another.default.svc"))


@pytest.mark.parametrize(
    ("hosts", "later", "fit"),
    [
        pytest.param(HOSTS, timedelta(0), True, id="new"),
        pytest.param(HOSTS, LIFETIME - RENEWAL - timedelta(seconds=1), True, id="with time left"),
        pytest.param(HOSTS, LIFETIME - RENEWAL, False, id="to be replaced"),
        pytest.param(HOSTS, 2 * LIFETIME, False, id="ended long ago"),
        pytest.param(service_hosts("renamed", "moejob-system"), timedelta(0), False, id="the service was renamed"),
    ],
)
def test_a_certificate_stays_until_it_ends_soon_or_names_change(
    hosts: tuple[str, ...], later: timedelta, fit: bool
) -> None:
    assert is_fit(make_pair(HOSTS, NOW), hosts, NOW + later) is fit


PAIR, OTHER = make_pair(HOSTS, NOW), make_pair(HOSTS, NOW)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"data": None}, id="an empty Secret, as a chart makes it"),
        pytest.param({"data": {}}, id="no keys"),
        pytest.param(secret(PAIR, **{"tls.key": encoded(OTHER.key)}), id="the key of another"),
        pytest.param(secret(PAIR, **{"tls.key": "%%%"}), id="not base64"),
        pytest.param(secret(PAIR, **{"tls.crt": encoded(b"-----BEGIN CERTIFICATE-----")}), id="no certificate"),
        pytest.param(secret(PAIR, **{"tls.key": None}), id="without its key"),
    ],
)
def test_a_secret_that_cannot_be_served_holds_no_certificate(broken: dict[str, Any]) -> None:
    assert read_pair(broken) is None


def test_a_secret_gives_back_what_was_put_in() -> None:
    assert read_pair(secret(PAIR)) == PAIR


def test_a_secret_of_cert_manager_need_not_hold_an_authority() -> None:
    found = read_pair(secret(PAIR, **{"ca.crt": None}))
    assert found is not None
    assert found.certificate == PAIR.certificate


# --- keeping it -----------------------------------------------------------------------------------------------------


async def kept(
    server: StandInServer, store: CertificateStore, now: datetime = NOW
) -> tuple[KeyPair, list[RecordedRequest]]:
    """The certificate after it was kept, and what was written for that."""
    server.requests.clear()
    pair = await store.ensure_certificate(HOSTS, now)
    return pair, [asked for asked in server.requests if asked.method != "GET"]


def test_the_first_leader_makes_a_certificate_and_has_it_trusted_before_it_is_served() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {HOOKS}", (200, hooks("", "")))
            server.set_answers(f"PATCH {HOOKS}", (200, {}))
            server.set_answers(f"POST {SECRETS}", (201, {}))
            pair, written = await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            trust, store = written
            assert reply_to(trust) == pair.authority
            assert trust.headers["Content-Type"] == "application/strategic-merge-patch+json"
            assert [hook["name"] for hook in trust.body["webhooks"]] == ["hook-0", "hook-1"]
            assert store.body["type"] == "kubernetes.io/tls"
            assert read_pair(store.body) == pair

    asyncio.run(story())


def test_at_rest_nothing_is_written() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {SECRET}", (200, secret(PAIR)))
            server.set_answers(f"GET {HOOKS}", (200, hooks(encoded(PAIR.authority))))
            pair, written = await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            assert (pair, written) == (PAIR, [])

    asyncio.run(story())


def test_a_bundle_that_somebody_emptied_is_filled_again() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {SECRET}", (200, secret(PAIR)))
            server.set_answers(f"GET {HOOKS}", (200, hooks(encoded(PAIR.authority), "")))
            server.set_answers(f"PATCH {HOOKS}", (200, {}))
            _, [trust] = await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            assert [hook["name"] for hook in trust.body["webhooks"]] == ["hook-1"]

    asyncio.run(story())


def test_while_a_certificate_is_replaced_old_and_new_are_trusted() -> None:
    first = make_pair(HOSTS, NOW - LIFETIME + RENEWAL)

    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {SECRET}", (200, secret(first)))
            server.set_answers(f"GET {HOOKS}", (200, hooks(encoded(first.authority))))
            server.set_answers(f"PATCH {HOOKS}", (200, {}))
            server.set_answers(f"PATCH {SECRET}", (200, {}))
            store = CertificateStore(api, "moejob-system", "certificate", "moejob")
            second, (trust, written) = await kept(server, store)
            assert second.certificate != first.certificate
            # Replicas that have not read the Secret yet serve the old one, those that have the new one.
            for served in (first, second):
                await shaken(served, reply_to(trust), HOSTS[0])
            assert written.body["metadata"]["resourceVersion"] == "5"

            # A third one: of the authorities before, only the last one can still be in use.
            server.set_answers(f"GET {SECRET}", (200, secret(second)))
            third, (trust, _) = await kept(server, store, NOW + LIFETIME - RENEWAL)
            assert reply_to(trust) == third.authority
            assert third.authority.count(b"BEGIN") == 2
            assert first.authority not in third.authority

    asyncio.run(story())


@pytest.mark.parametrize(
    "authority",
    [
        pytest.param(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n", id="nonsense"),
        pytest.param(b"", id="none"),
        pytest.param(make_pair(HOSTS, NOW).authority, id="that of another certificate"),
    ],
)
def test_a_certificate_that_its_authority_did_not_sign_is_replaced(authority: bytes) -> None:
    damaged = replace(PAIR, authority=authority)

    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {SECRET}", (200, secret(damaged)))
            server.set_answers(f"GET {HOOKS}", (200, hooks(encoded(authority))))
            server.set_answers(f"PATCH {HOOKS}", (200, {}))
            server.set_answers(f"PATCH {SECRET}", (200, {}))
            pair, (trust, _) = await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            assert pair.certificate != damaged.certificate
            await shaken(pair, reply_to(trust), HOSTS[0])

    asyncio.run(story())


def test_a_certificate_is_not_stored_when_it_could_not_be_trusted() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"GET {HOOKS}", (200, hooks("")))
            server.set_answers(f"PATCH {HOOKS}", refusal_answer(403, "Forbidden"))
            with pytest.raises(Forbidden):
                await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            assert not any(asked.path.startswith(SECRETS) for asked in server.requests if asked.method != "GET")

    asyncio.run(story())


def test_a_webhook_that_is_not_there_is_no_reason_not_to_have_a_certificate() -> None:
    async def story() -> None:
        async with serve_stand_in() as (server, api):
            server.set_answers(f"POST {SECRETS}", (201, {}))
            _, written = await kept(server, CertificateStore(api, "moejob-system", "certificate", "moejob"))
            assert [str(asked) for asked in written] == [f"POST {SECRETS}"]

    asyncio.run(story())
