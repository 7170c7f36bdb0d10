"""Credentials of the operator, out of files as administrators write them."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from moejob_client.credentials import CredentialsError
from moejob_operator.kube_api.account import load_account


def encode(text: str) -> str:
    return b64encode(text.encode()).decode()


def write_kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(content))
    return path


def test_a_kubeconfig_gives_server_authority_and_certificate(tmp_path: Path) -> None:
    user = {"client-certificate-data": encode("certificate"), "client-key-data": encode("key")}
    cluster = {"certificate-authority-data": encode("authority"), "tls-server-name": "inside"}
    found = asyncio.run(load_account(write_kubeconfig(tmp_path, user, **cluster)))
    assert (found.host, found.server_name, found.is_verified) == ("https://api:6443", "inside", True)
    assert (found.authority, found.client_certificate, found.client_key) == ("authority", "certificate", "key")


def test_a_token_is_sent_with_each_request(tmp_path: Path) -> None:
    async def read_header() -> str | None:
        return await (await load_account(write_kubeconfig(tmp_path, {"token": "secret"}))).find_authorization()

    assert asyncio.run(read_header()) == "Bearer secret"


def test_a_plugin_is_asked_for_the_token(tmp_path: Path) -> None:
    reply = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "fresh"}}
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "echo",
        "args": [json.dumps(reply)],
        "interactiveMode": "Never",
    }

    async def read_header() -> str | None:
        return await (await load_account(write_kubeconfig(tmp_path, {"exec": plugin}))).find_authorization()

    assert asyncio.run(read_header()) == "Bearer fresh"


def test_a_file_that_names_no_cluster_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "there", "contexts": []}))
    with pytest.raises(CredentialsError, match="there"):
        asyncio.run(load_account(path))
