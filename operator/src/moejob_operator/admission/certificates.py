"""The webhook's certificate: one for all replicas, in a Secret, replaced before it ends without a gap in trust.

The authority's key is thrown away once it has signed: no process can sign a second certificate, and a new certificate
comes with a new authority. So that no request fails meanwhile, the API server is made to trust the new authority beside
the old one (caBundle) before the new certificate is stored, and the old one stays there until the next replacement.
"""

from __future__ import annotations

import base64
import binascii
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moejob_client.api_client import ApiClient
from moejob_client.errors import NotFound
from moejob_operator.cluster import Raw
from moejob_operator.logs import Log

log = Log(__name__)

LIFETIME = timedelta(days=365)
RENEWAL = timedelta(days=60)
# For API servers whose clocks are behind ours.
_BACKDATED = timedelta(hours=1)
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_CERTIFICATE, _KEY, _AUTHORITY = "tls.crt", "tls.key", "ca.crt"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate, its key and the authorities by which clients trust it, all in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    @property
    def ends_at(self) -> datetime:
        """Return when it becomes invalid."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names it is for."""
        certificate = x509.load_pem_x509_certificate(self.certificate)
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return ()
        return tuple(names.value.get_values_for_type(x509.DNSName))


def service_hosts(service: str, namespace: str) -> tuple[str, ...]:
    """The names by which an API server reaches a service; it uses the first."""
    return (f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}")


def make_pair(hosts: tuple[str, ...], now: datetime) -> KeyPair:
    """A new certificate for these names, signed by a new authority whose key is not kept."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"moejob webhook authority {now:%Y-%m-%d}")])
    authority = (
        _certificate_builder(name, name, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    # A common name has room for 64 characters; clients check the alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "moejob webhook")])
    certificate = (
        _certificate_builder(subject, name, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        authority.public_bytes(serialization.Encoding.PEM),
    )


def is_fit(pair: KeyPair | None, hosts: tuple[str, ...], now: datetime) -> bool:
    """Return whether a pair can stay: it is for these names, will not end soon, and its authority has signed it."""
    return pair is not None and set(hosts) <= set(pair.hosts) and now < pair.ends_at - RENEWAL and _is_signed(pair)


def read_pair(secret: Raw) -> KeyPair | None:
    """Return the pair in a Secret of type kubernetes.io/tls; None when it holds no certificate with its key."""
    data = secret.get("data") or {}
    try:
        pair = KeyPair(
            *(base64.b64decode(data.get(name) or "", validate=True) for name in (_CERTIFICATE, _KEY, _AUTHORITY))
        )
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError, binascii.Error):
        return None
    return pair if certificate.public_key() == key.public_key() else None


def newest_authority(bundle: bytes) -> bytes:
    """Return the newest authority of a bundle, which stands first; empty when none can be read."""
    certificates = _authorities(bundle)
    return certificates[0].public_bytes(serialization.Encoding.PEM) if certificates else b""


def _authorities(bundle: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def _is_signed(pair: KeyPair) -> bool:
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    return any(_has_signed(certificate, authority) for authority in _authorities(pair.authority))


def _has_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Serve this certificate from the next connection on."""
    # The standard library loads certificates from files only.
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder, _CERTIFICATE), Path(folder, _KEY)
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)


@dataclass(frozen=True, slots=True)
class CertificateStore:
    """The Secret with the certificate, and the webhook configuration that has to trust it."""

    api: ApiClient
    namespace: str
    secret: str
    configuration: str

    async def read(self) -> KeyPair | None:
        """Return the pair that the Secret holds now; None when there is none to serve."""
        raw = await self._read_secret()
        return None if raw is None else read_pair(raw)

    async def ensure_certificate(self, hosts: tuple[str, ...], now: datetime) -> KeyPair:
        """Make sure that a lasting certificate exists and is trusted. For the leader alone."""
        raw = await self._read_secret()
        pair = None if raw is None else read_pair(raw)
        if pair is not None and is_fit(pair, hosts, now):
            await self._trust_bundle(pair.authority)
            return pair
        new_pair = make_pair(hosts, now)
        bundle = new_pair.authority + (newest_authority(pair.authority) if pair is not None else b"")
        new_pair = KeyPair(new_pair.certificate, new_pair.key, bundle)
        await self._trust_bundle(bundle)
        await self._write_secret(new_pair, raw)
        log.info("made a certificate", secret=self.secret, ends=new_pair.ends_at.isoformat(), hosts=hosts)
        return new_pair

    async def _read_secret(self) -> Raw | None:
        try:
            return await self.api.get(self._secret_path)
        except NotFound:
            return None

    async def _write_secret(self, pair: KeyPair, existing: Raw | None) -> None:
        data = {_CERTIFICATE: pair.certificate, _KEY: pair.key, _AUTHORITY: pair.authority}
        body = {"data": {name: base64.b64encode(value).decode() for name, value in data.items()}}
        if existing is not None:
            await self.api.patch(
                self._secret_path, body | {"metadata": {"resourceVersion": existing["metadata"]["resourceVersion"]}}
            )
            return
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": self.secret, "namespace": self.namespace},
        }
        await self.api.create(self._secret_path.rpartition("/")[0], secret | body)

    async def _trust_bundle(self, bundle: bytes) -> None:
        path = f"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{self.configuration}"
        try:
            webhook_configuration = await self.api.get(path)
        except NotFound:
            log.warning("there is no webhook configuration to put the authority into", name=self.configuration)
            return
        encoded = base64.b64encode(bundle).decode()
        stale = [
            hook["name"]
            for hook in webhook_configuration.get("webhooks") or ()
            if hook["clientConfig"].get("caBundle") != encoded
        ]
        if stale:
            # Merged by name: the chart's other fields of a webhook stay.
            hooks = [{"name": name, "clientConfig": {"caBundle": encoded}} for name in stale]
            await self.api.patch(path, {"webhooks": hooks}, _STRATEGIC_PATCH)

    @property
    def _secret_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets/{self.secret}"


def utc_now() -> datetime:
    """The time that certificates are made and judged by."""
    return datetime.now(UTC)


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
