"""The page as one text: markup, style and program of this package, and a policy that lets nothing else run or load.

The browser runs the program and the style whose hashes the policy names, and asks no host but the one that served the
page. A file asks none at all: its data is in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def content_policy(*, is_file: bool) -> str:
    """Return the Content-Security-Policy of the page."""
    rules = {
        "default-src": "'none'",
        "script-src": _source_hash("page.js"),
        "style-src": _source_hash("page.css"),
        "img-src": "data:",
        "connect-src": "'none'" if is_file else "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if not is_file:
        # A policy in the markup cannot have it.
        rules["frame-ancestors"] = "'none'"
    return "; ".join(f"{name} {source}" for name, source in rules.items())


def build_page(data: Any = None) -> str:
    """Return the page; with data it is a file that needs no server."""
    policy = (
        "" if data is None else f'<meta http-equiv="Content-Security-Policy" content="{content_policy(is_file=True)}">'
    )
    text = "" if data is None else script_text(data)
    return (
        _read_asset("page.html")
        .replace("{policy}", policy)
        .replace("{style}", _read_asset("page.css"))
        .replace("{program}", _read_asset("page.js"))
        .replace("{data}", text)
    )


def script_text(data: Any) -> str:
    """Return data as JSON that ends no element, whatever strings are in it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read_asset(name: str) -> str:
    return (files("moejob_cli.board") / "assets" / name).read_text(encoding="utf-8")


def _source_hash(name: str) -> str:
    digest = hashlib.sha256(_read_asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
