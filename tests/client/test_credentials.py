"""Credentials as kubectl finds them: files, contexts, tokens, plugins and certificates; what is wrong is named."""

from __future__ import annotations

import asyncio
import json
import stat
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest

from moejob_client import credentials
from moejob_client.credentials import Credentials, CredentialsError, load_credentials

SERVER = "https://10.0.0.1:6443"


def write_config(path: Path, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    content = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "there", "context": {"cluster": "c", "user": "u"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": SERVER + "/", **cluster}}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def load(kubeconfig: Path | None, context: str | None = None) -> Credentials:
    return asyncio.run(load_credentials(kubeconfig, context))


def authorization(found: Credentials) -> str | None:
    return asyncio.run(found.find_authorization())


def write_plugin(path: Path, status: dict[str, Any], code: int = 0) -> Path:
    """A plugin that counts its runs, keeps its request, and answers."""
    answer = json.dumps({"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status})
    path.write_text(
        f'#!/bin/sh\necho run >>{path}.runs\necho "$KUBERNETES_EXEC_INFO" >{path}.request\necho sorry >&2\n'
        f"printf '%s' '{answer}'\nexit {code}\n"
    )
    path.chmod(0o700)
    return path


def plugin_user(command: str, **more: Any) -> dict[str, Any]:
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command, **more}}


def runs_of(plugin: Path) -> int:
    return len(Path(f"{plugin}.runs").read_text().splitlines())


@pytest.fixture(autouse=True)
def _outside_of_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.parametrize(("context", "namespace"), [(None, "team"), ("there", "default")])
def test_the_context_names_server_and_namespace(tmp_path: Path, context: str | None, namespace: str) -> None:
    found = load(write_config(tmp_path / "config", {"token": "secret"}), context)
    assert (found.host, found.namespace, authorization(found)) == (SERVER, namespace, "Bearer secret")


def test_files_of_kubeconfig_are_merged_and_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "first"
    first.write_text("users: [{name: u, user: {token: first}}]\n")
    second = write_config(tmp_path / "second", {"token": "second"})
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'missing'}:{second}")
    assert authorization(load(None)) == "Bearer first"


def test_paths_are_relative_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path / "kube" / "config", {"tokenFile": "token"}, **{"certificate-authority": "ca.pem"})
    (config.parent / "token").write_text("from-file\n")
    (config.parent / "ca.pem").write_text("PEM\n")
    monkeypatch.chdir(tmp_path)
    found = load(Path("kube/config"))
    assert (authorization(found), found.authority) == ("Bearer from-file", "PEM\n")


def test_a_token_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_TOKEN_FILE_SECONDS", 0.0)
    (tmp_path / "token").write_text("old")
    found = load(write_config(tmp_path / "config", {"tokenFile": "token"}))
    (tmp_path / "token").write_text("new")
    assert authorization(found) == "Bearer new"


def test_a_password_is_sent_as_basic(tmp_path: Path) -> None:
    found = load(write_config(tmp_path / "config", {"username": "me", "password": "word"}))
    assert authorization(found) == f"Basic {b64encode(b'me:word').decode()}"


def test_settings_of_a_cluster_are_taken(tmp_path: Path) -> None:
    settings = {"insecure-skip-tls-verify": True, "tls-server-name": "name", "proxy-url": "http://proxy:1"}
    found = load(write_config(tmp_path / "config", {}, **settings))
    assert (found.is_verified, found.server_name, found.proxy) == (False, "name", "http://proxy:1")


def test_a_plugin_runs_once_while_its_token_is_good(tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path / "plugin", {"token": "t", "expirationTimestamp": "2099-01-01T00:00:00Z"})
    found = load(write_config(tmp_path / "config", plugin_user("./plugin", provideClusterInfo=True)))
    assert [authorization(found), authorization(found)] == ["Bearer t"] * 2
    assert runs_of(plugin) == 1
    assert json.loads(Path(f"{plugin}.request").read_text())["spec"]["cluster"] == {"server": SERVER + "/"}


def test_a_plugin_runs_again_when_its_token_has_run_out(tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path / "plugin", {"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"})
    found = load(write_config(tmp_path / "config", plugin_user(str(plugin))))
    assert authorization(found) == "Bearer t"
    assert runs_of(plugin) == 2


def test_a_plugin_may_answer_with_a_certificate(tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"
    write_plugin(tmp_path / "plugin", {"clientCertificateData": pem, "clientKeyData": "key\nof two lines"})
    found = load(write_config(tmp_path / "config", plugin_user("./plugin")))
    assert (found.client_certificate, found.client_key, authorization(found)) == (pem, "key\nof two lines", None)


def jwt(**claims: Any) -> str:
    payload = urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{payload}.signature"


def test_a_token_of_an_auth_provider_is_used_while_it_is_good(tmp_path: Path) -> None:
    token = jwt(exp=4_000_000_000)
    user = {"auth-provider": {"name": "oidc", "config": {"id-token": token}}}
    assert authorization(load(write_config(tmp_path / "config", user))) == f"Bearer {token}"


EXPIRED = {"auth-provider": {"name": "oidc", "config": {"id-token": jwt(exp=1)}}}


@pytest.mark.parametrize(
    ("user", "message"),
    [
        pytest.param(EXPIRED, "has run out; run `kubectl get namespaces`, which renews it", id="expired provider"),
        pytest.param({"tokenFile": "none"}, "the token of the user u cannot be read", id="no token file"),
        pytest.param(
            plugin_user("no-such-program", installHint="install it"), "cannot run: .*; install it", id="no plugin"
        ),
        pytest.param(plugin_user("./failing"), "ended with 3: sorry", id="a plugin fails"),
        pytest.param(plugin_user("./empty"), "neither with a token nor with a certificate", id="no answer"),
        pytest.param({"client-certificate-data": "!"}, "client-certificate of u cannot be read", id="no base64"),
    ],
)
def test_credentials_that_cannot_be_used_are_named(tmp_path: Path, user: dict[str, Any], message: str) -> None:
    write_plugin(tmp_path / "failing", {"token": "t"}, code=3)
    write_plugin(tmp_path / "empty", {})
    with pytest.raises(CredentialsError, match=message):
        load(write_config(tmp_path / "config", user))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot be read"),
        ("text", "is no kubeconfig"),
        ("{}", "has no current context"),
        ("current-context: x", "there is no context 'x'"),
        ("{current-context: x, contexts: [{name: x, context: {cluster: y}}]}", "there is no cluster 'y'"),
    ],
)
def test_a_kubeconfig_that_names_no_server_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(CredentialsError, match=message):
        load(tmp_path / "config")


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"there is no .*/nothing"):
        load(tmp_path / "nothing")


def test_a_pod_has_the_credentials_of_its_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setattr(credentials, "_ACCOUNT", tmp_path)
    for name, text in {"token": "t\n", "ca.crt": "PEM", "namespace": "team\n"}.items():
        (tmp_path / name).write_text(text)
    found = load(None)
    assert (found.host, found.namespace, found.authority) == ("https://[fd00::1]:6443", "team", "PEM")
    assert authorization(found) == "Bearer t"


def test_keys_are_not_printed() -> None:
    found = Credentials(SERVER, client_certificate="PEM", client_key="hidden")
    assert "hidden" not in repr(found)


def test_no_key_stays_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    class Context:
        def load_cert_chain(self, file: str) -> None:
            modes.append(stat.S_IMODE(Path(file).stat().st_mode))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    credentials._load_certificate(Context(), "certificate", "key")  # type: ignore[arg-type]  # noqa: SLF001
    assert (modes, list(tmp_path.iterdir())) == ([0o600], [])
