"""A headless Chromium of Debian for tests, spoken to over a pipe: it needs no driver and no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium")
_SECONDS = 60.0


class Chromium:
    """One browser with one page."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 800) -> None:
        assert PROGRAM is not None
        # Chromium reads its descriptor 3 and writes to 4.
        command_end, self._commands = os.pipe()
        self._answers, answer_end = os.pipe()
        script = f'exec "$0" "$@" 3<&{command_end} 4>&{answer_end}'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, PROGRAM, *flags, "about:blank"],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._number, self._unread = 0, b""
        self.events: list[dict[str, Any]] = []
        target = next(each for each in self._send("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str, view: str = "Curves") -> None:
        """Open a page and wait until one of its views is shown."""
        self.send("Page.navigate", url=url)
        self.wait_for(f"document.body && document.body.dataset.ready === {view!r}")

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def set_theme(self, theme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            if self.evaluate(f"!!({expression})"):
                return
            time.sleep(0.02)
        raise AssertionError(f"{expression} did not become true: {self.evaluate('document.body.innerText')}")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else ""
            )

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **params: Any) -> Any:
        return self._send(method, self._session, **params)

    def _send(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read_message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "the browser has ended"
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
