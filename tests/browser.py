"""A headless Chromium, driven over its debugging pipe: no port, no WebSocket."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import needs
from tests.support import TIMEOUT_S


class Page:
    """One tab.

    Args:
        send: Sends a command and returns its result.
    """

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send

    def open(self, url: str) -> None:
        """Goes there."""
        self._send("Page.enable")
        self._send("Runtime.enable")
        self._send("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def without(self, *patterns: str) -> None:
        """Loads nothing from addresses like these from now on, such as `*.json`."""
        self._send("Network.enable")
        self._send("Network.setBlockedURLs", urls=[*patterns])

    def see(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the window's size, and the preferred color scheme."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Waits until an expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            found = self.run(script)
            if found:
                return found
            if time.monotonic() > end:
                text = self.run("document.body.innerText")
                raise AssertionError(f"waited in vain for {script}; the page says:\n{text}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks on the middle of an element, as a mouse does."""
        # Where it is hidden, covered or about to move, a click would go elsewhere.
        box = self.wait_for(
            f"""(async () => {{
                const one = document.querySelector({selector!r});
                if (!one) return null;
                one.scrollIntoView({{block: "center"}});
                const middle = () => {{
                    const box = one.getBoundingClientRect();
                    return [box.x + box.width / 2, box.y + box.height / 2];
                }};
                const before = middle();
                await new Promise((done) => setTimeout(done, 100));
                const [x, y] = middle(), hit = document.elementFromPoint(x, y);
                const still = x === before[0] && y === before[1] && one.isConnected;
                const picture = one.closest("svg");
                const free = hit && (one.contains(hit) || (picture && picture.contains(hit)));
                return still && free ? [x, y] : null;
            }})()"""
        )
        self.move(*box)
        for kind in ("mousePressed", "mouseReleased"):
            self._send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def move(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, selector: str, text: str) -> None:
        """Clicks into a field and types."""
        self.click(selector)
        self._send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Returns a screenshot as PNG."""
        answer = self._send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """Starts Chromium with its own profile.

    Args:
        directory: For that.
    """
    to_read, to_us = os.pipe()
    from_us, to_write = os.pipe()
    command = [
        needs.tool("chromium"),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={directory}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    # Chromium reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(directory)},
        )
    os.close(from_us)
    os.close(to_us)
    number = 0
    buffer = b""

    def send(method: str, session: str | None = None, **params: Any) -> Any:
        nonlocal number, buffer
        number += 1
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(to_write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in buffer:
                text, _, buffer = buffer.partition(b"\0")
                answer = json.loads(text)
                if answer.get("id") == number:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    return answer["result"]
            left = end - time.monotonic()
            assert left > 0, f"Chromium does not answer {method}"
            if select.select([to_read], [], [], left)[0]:
                more = os.read(to_read, 2**16)
                assert more, f"Chromium ended:\n{(directory / 'chromium.log').read_text()}"
                buffer += more

    try:
        target = send("Target.createTarget", url="about:blank")["targetId"]
        session = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        yield Page(lambda method, **params: send(method, session, **params))
    finally:
        with contextlib.suppress(AssertionError, OSError):
            send("Browser.close")
        os.close(to_write)
        os.close(to_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
