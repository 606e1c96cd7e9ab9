"""A headless Chromium, driven over the pipe of its DevTools protocol."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    # Whatever is not on this machine is not found.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
# The browser's ends of its pipes are its files 3 and 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)


class Page:
    """A page of the browser. trouble: errors of its scripts, and of what it could not load."""

    def __init__(self, send, receive):
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self.trouble: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            message += byte
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.trouble.append(f"{details['text']} {thrown}")
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.trouble.append(params["entry"]["text"])

    def open(self, url: str, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression. Raises RuntimeError where it throws."""
        got = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{expression}: {got['exceptionDetails']['text']}")
        return got["result"].get("value")

    def wait_for(self, expression: str, within_s: float) -> bool:
        """Whether it becomes true in this time; what throws is not true yet."""
        expression = f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"
        deadline_s = time.monotonic() + within_s
        while not (true := bool(self.value(expression))) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return true

    def picture(self) -> bytes:
        """PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


def path() -> str:
    """Raises ValueError where there is none."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        raise ValueError(
            f"no browser: none of {', '.join(NAMES)} is on the PATH; on Debian, "
            "`apt-get install chromium` brings one"
        )
    return found


@contextlib.contextmanager
def page(browser: str) -> Iterator[Page]:
    """An empty page; the browser, at this path, ends with the `with`."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        send = stack.enter_context(os.fdopen(ours_out, "wb"))
        receive = stack.enter_context(os.fdopen(ours_in, "rb"))
        # Neither must be one of the numbers that they are copied to.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]

        launch = [sys.executable, "-c", LAUNCH, *map(str, ends), browser]
        process = subprocess.Popen(
            [*launch, *FLAGS, f"--user-data-dir={home}"], pass_fds=ends,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        try:
            yield Page(send, receive)
        finally:
            process.terminate()
            process.wait(30)
