"""make bases asks registries for digests and writes them down; releases and builds with a registry take no others."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from image_builds import bases
from image_builds.__main__ import order
from image_builds.bases import BadPinsError, named_bases, on_pinned_bases, pins
from image_builds.commands import Supplies
from image_builds.engines import Docker, Engine, Podman
from image_builds.recipes import RECIPES, ROOT
from image_builds.registries import UnknownDigestError, digest_of

MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
PYTHON, DISTROLESS = "docker.io/library/python:3.13-slim-trixie", "gcr.io/distroless/python3-debian13:nonroot"
Answer = Callable[["_Request"], None]


class _Request(BaseHTTPRequestHandler):
    """A request to a registry, answered as a test wants it."""

    answer: Answer
    base: str

    def do_GET(self) -> None:
        type(self).answer(self)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def says(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[Callable[[Answer], str]]:
    """Start a registry that answers so; the result is the name of an image in it."""
    started = list[ThreadingHTTPServer]()

    def start(answer: Answer) -> str:
        handler: Any = type("Handler", (_Request,), {"answer": staticmethod(answer)})
        started.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        handler.base = f"http://127.0.0.1:{started[-1].server_port}"
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{started[-1].server_port}/library/python:3.13"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def plain(request: _Request) -> None:
    is_asked_well = request.path == "/v2/library/python/manifests/3.13" and "index.v1" in request.headers["Accept"]
    request.says(200 if is_asked_well else 400, MANIFEST, Docker_Content_Digest=DIGEST)


def with_token(request: _Request) -> None:
    """As registries do that let all clients read, once they have fetched a token."""
    if request.path == "/token?service=registry&scope=repository%3Alibrary%2Fpython%3Apull":
        request.says(200, b'{"token": "for all"}')
    elif request.headers["Authorization"] == "Bearer for all":
        plain(request)
    else:
        where = f'realm="{request.base}/token",service="registry",scope="repository:library/python:pull"'
        request.says(401, b"", WWW_Authenticate=f"Bearer {where}")


@pytest.mark.parametrize("answer", [plain, with_token, lambda request: request.says(200, MANIFEST)])
def test_a_digest_is_that_of_the_manifest_which_a_registry_sends(
    registry: Callable[[Answer], str], answer: Answer
) -> None:
    assert digest_of(registry(answer)) == DIGEST


def endless(request: _Request) -> None:
    request.says(200, b"")
    try:
        while True:
            request.wfile.write(b" " * 65_536)
    except OSError:
        return


def elsewhere(request: _Request) -> None:
    if request.path == "/elsewhere":
        request.says(200, MANIFEST)
    else:
        request.says(307, b"", Location=f"{request.base}/elsewhere")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(lambda request: request.says(404, b""), "Not Found", id="no such image"),
        pytest.param(
            lambda request: request.says(200, MANIFEST + b" ", Docker_Content_Digest=DIGEST),
            "trust neither",
            id="another manifest than it says",
        ),
        pytest.param(endless, "sends more than 4194304 bytes", id="a manifest without end"),
        pytest.param(elsewhere, "307", id="sent elsewhere"),
        pytest.param(
            lambda request: request.says(401, b"", WWW_Authenticate='Bearer realm="http://example.com/token"'),
            "login that is not understood",
            id="a token without TLS",
        ),
        pytest.param(
            lambda request: request.says(401, b"", WWW_Authenticate='Basic realm="a"'),
            "login that is not understood",
            id="a password",
        ),
    ],
)
def test_of_what_a_registry_does_not_say_clearly_nothing_is_believed(
    registry: Callable[[Answer], str], answer: Answer, said: str
) -> None:
    with pytest.raises(UnknownDigestError, match=said):
        digest_of(registry(answer))


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The Dockerfiles, and no digest yet."""
    for recipe in RECIPES.values():
        (tmp_path / recipe.dockerfile).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / recipe.dockerfile).write_text((ROOT / recipe.dockerfile).read_text())
    return tmp_path


def test_every_base_of_every_dockerfile_gets_its_digest(tree: Path) -> None:
    assert bases.main([], tree, lambda _: DIGEST) == 0
    assert pins(tree) == {PYTHON: DIGEST, DISTROLESS: DIGEST}
    assert bases.main(["--check"], tree) == 0


def test_a_base_without_a_digest_changes_nothing_and_is_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(image: str) -> str:
        if image == PYTHON:
            return DIGEST
        raise UnknownDigestError(f"{image}: gone")

    assert bases.main([], tree, ask) == 1
    assert capsys.readouterr().out == f"{DISTROLESS}: gone\n"
    assert not (tree / bases.FILE).exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, f"{DISTROLESS} has no digest", id="no file"),
        pytest.param(f"{PYTHON}@{DIGEST}\n", f"{DISTROLESS} has no digest", id="one is missing"),
        pytest.param(f"{PYTHON}@{DIGEST}\n{DISTROLESS}\n", "write it with `make bases`", id="a tag alone"),
        pytest.param(f"{PYTHON}@sha256:12\n", "write it with `make bases`", id="half a digest"),
    ],
)
def test_a_release_without_the_digest_of_each_base_is_refused(
    tree: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tree / bases.FILE).write_text(content)
    assert bases.main(["--check"], tree) == 1
    assert said in capsys.readouterr().out


def test_the_digests_that_are_committed_can_be_read() -> None:
    known = {image for recipe in RECIPES.values() for _, image in named_bases((ROOT / recipe.dockerfile).read_text())}
    assert set(pins()) <= known, "images/bases.txt names what no Dockerfile stands on; write it with `make bases`"


# --- builds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Docker(), Podman()], ids=["docker", "podman"])
def test_a_build_stands_on_the_digests_of_its_bases(
    tree: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases.main([], tree, lambda _: DIGEST)
    for name in ("docker", "podman"):
        (tree / name).write_text(f'#!/bin/sh\necho "$@" >>{tree}/log\n')
        (tree / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tree}:/usr/bin:/bin")
    engine.build(replace(order(RECIPES["operator"], {}), context=tree), Supplies({}, Path("/downloads")))
    ran = (tree / "log").read_text().split()
    assert {f"BASE={PYTHON}@{DIGEST}", f"RUNTIME={DISTROLESS}@{DIGEST}"} < set(ran)


def test_a_base_that_the_user_names_is_taken_as_it_is() -> None:
    wanted = on_pinned_bases(order(RECIPES["operator"], {"BASE": "mine:1"}), {PYTHON: DIGEST, DISTROLESS: DIGEST})
    assert wanted.arguments == {"BASE": "mine:1", "RUNTIME": f"{DISTROLESS}@{DIGEST}"}


def test_a_file_that_holds_something_else_ends_the_build(tree: Path) -> None:
    (tree / bases.FILE).write_text("python:3.13\n")
    with pytest.raises(BadPinsError, match="no IMAGE:TAG@sha256:DIGEST"):
        pins(tree)
