"""A real Chromium for tests of pages, driven by its DevTools protocol over two pipes: no driver, no library, no port.

The protocol: https://chromedevtools.github.io/devtools-protocol/ ; `--remote-debugging-pipe` reads JSON messages, each ended by a
zero byte, from descriptor 3 and writes them to descriptor 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.tools import tool

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--force-color-profile=srgb", "--hide-scrollbars", "--remote-debugging-pipe",
    # What is not on this machine does not exist: a page that needs it fails here as it does offline.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
_PIPES = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_ANSWER_TIMEOUT_S = 60.0
_WAIT_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
# What the browser says of an expression whose document another one replaces before it answers.
_DOCUMENT_ENDED = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")

DESKTOP = (1280, 800, False)
PHONE = (390, 844, True)


class PageFailed(AssertionError):
    """A page did not do what was expected, or the browser did not answer."""


class ExpressionFailed(PageFailed):
    """A JavaScript expression throws, or its document has ended before it had a value."""


def find_chromium() -> str:
    """Path of the browser; without one the test is skipped, or fails in CI."""
    return next(filter(None, map(shutil.which, _NAMES)), None) or tool("chromium")


@contextlib.contextmanager
def chromium(folder: Path, *options: str) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder` and more options, for the length of a `with`."""
    browser = Browser(find_chromium(), folder, options)
    try:
        yield browser
    finally:
        browser.close()


class Browser:
    """A browser process.

    Args:
        path: of Chromium.
        folder: an empty one, for its profile and its log.
        options: more of them; the last of two equal ones counts.
    """

    def __init__(self, path: str, folder: Path, options: Sequence[str] = ()) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # Out of the way of 3 and 4.
        ends = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (to_read, to_write)]
        words = [path, *_OPTIONS, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._log = folder / "chromium.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PIPES, *map(str, ends), *words],
                stdout=log,
                stderr=log,
                pass_fds=ends,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder)},
            )
        for descriptor in (to_read, to_write, *ends):
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def open(self, url: str, screen: tuple[int, int, bool] = DESKTOP, dark: bool = False) -> Page:
        """A new page, loaded.

        Args:
            url: where.
            screen: width and height in CSS pixels, and whether it is a phone's.
            dark: what the user prefers.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            page.call(f"{domain}.enable")
        width, height, phone = screen
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def call(self, method: str, session: str = "", /, **params: Any) -> Any:
        """One command; its result. Events that come meanwhile go to their pages.

        Raises:
            PageFailed: the browser refused, ended, or said nothing in time.
        """
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._to, rest) :]
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            message = self._message(deadline - time.monotonic())
            if message.get("id") == number:
                if "error" in message:
                    ended = message["error"].get("message", "").startswith(_DOCUMENT_ENDED)
                    raise (ExpressionFailed if ended else PageFailed)(f"{method}: {message['error']}")
                return message["result"]
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None and "method" in message:
                page.events.append((message["method"], message["params"]))

    def close(self) -> None:
        """End the process, and all that it has started."""
        with contextlib.suppress(PageFailed, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _message(self, timeout_s: float) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(timeout_s, 0))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                why = "has ended" if ready else f"said nothing for {_ANSWER_TIMEOUT_S:g} s"
                raise PageFailed(f"the browser {why}:\n{self._log.read_text(errors='replace')[-4000:]}")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Page:
    """A tab.

    Attributes:
        events: (method, parameters) of all events of the page.
    """

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.events: list[tuple[str, Any]] = []
        self._browser = browser
        self._session = session
        self._target = target

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, /, **params: Any) -> Any:
        """One command for this tab."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; raises ExpressionFailed with what it throws."""
        message = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        if "exceptionDetails" in message:
            details = message["exceptionDetails"]
            raise ExpressionFailed(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return message["result"].get("value")

    def wait(self, expression: str, timeout_s: float = _WAIT_TIMEOUT_S) -> None:
        """Wait until an expression is true, as JavaScript has it; raises PageFailed with the page's text if it never is.

        While the page moves to another document an expression may throw (no body yet), or have no value at all.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = "is not true"
            try:
                if self.evaluate(f"Boolean({expression})"):
                    return
            except ExpressionFailed as error:
                found = str(error)
            if time.monotonic() > deadline:
                text = self.evaluate("document.body?.innerText ?? ''")
                raise PageFailed(
                    f"not within {timeout_s:g} s: {expression}\n{found}\nthe page says:\n{text}\n{self.complaints()}"
                )
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def fill(self, selector: str, value: str) -> None:
        """Type text into a field."""
        field, text = json.dumps(selector), json.dumps(value)
        change = f"it.value = {text}; it.dispatchEvent(new Event('input'));"
        self.evaluate(f"(() => {{ const it = document.querySelector({field}); {change} }})()")

    def choose_files(self, selector: str, files: Sequence[Path]) -> None:
        """Give files to an <input type=file>."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop(self, selector: str, files: Sequence[Path]) -> None:
        """Drop files on an element, as from a file manager."""
        centre = self.evaluate(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.scrollIntoView({{block: 'center'}});"
            "const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for step in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=step, x=centre[0], y=centre[1], data=data)

    def screenshot(self, file: Path, selector: str = "") -> None:
        """Write a PNG of what is seen, or of one element."""
        clip = {}
        if selector:
            box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
            area = (
                f"(({{x, y, width, height}}) => ({{x: x + scrollX, y: y + scrollY, width, height, scale: 1}}))({box})"
            )
            clip = {"clip": self.evaluate(area), "captureBeyondViewport": True}
        message = self.call("Page.captureScreenshot", format="png", **clip)
        file.write_bytes(base64.b64decode(message["data"]))

    @property
    def requested(self) -> list[str]:
        """Return every requested URL, without data and blob URLs."""
        urls = [message["request"]["url"] for method, message in self._all() if method == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("blob:", "data:"))]

    def statuses(self, part: str) -> list[int]:
        """Return the status of every response whose URL contains `part`."""
        responses = [message["response"] for method, message in self._all() if method == "Network.responseReceived"]
        return [response["status"] for response in responses if part in response["url"]]

    def complaints(self) -> list[str]:
        """Return uncaught exceptions, errors in the console, and violations of the content security policy."""
        result = []
        for method, message in self._all():
            if method == "Runtime.exceptionThrown":
                details = message["exceptionDetails"]
                result.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Log.entryAdded" and message["entry"]["level"] == "error":
                result.append(f"{message['entry']['text']} {message['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and message["type"] in ("error", "warning"):
                result.append(str([argument.get("value") for argument in message["args"]]))
        return result

    def _all(self) -> list[tuple[str, Any]]:
        self.evaluate("0")  # events before this call have arrived after it
        return self.events
