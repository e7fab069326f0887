"""A real headless Chromium, driven over the pipe of its own debugging protocol: no package, no port."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

BINARY = next((p for n in ("chromium", "chromium-browser", "google-chrome", "chrome") if (p := shutil.which(n))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update")  # fmt: skip


class Chromium:
    """One page. `requests` holds every address it asked for, `errors` what its scripts threw and its policy refused."""

    def __init__(self, profile: Path):
        theirs_in, self.out = os.pipe()
        self.inn, theirs_out = os.pipe()
        # the protocol wants file descriptors 3 and 4; a shell puts them there
        words = [
            "bash",
            "-c",
            f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
            "bash",
            BINARY,
            *FLAGS,
            f"--user-data-dir={profile}",
        ]
        self.process = subprocess.Popen(
            words, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        os.close(theirs_in), os.close(theirs_out)
        self.buffer, self.last, self.session = b"", 0, None
        self.requests, self.errors = [], []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params) -> dict:
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict:
        while b"\0" not in self.buffer:
            part = os.read(self.inn, 1 << 16)
            assert part, "Chromium ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])

    def js(self, expression: str):
        """The value of an expression in the page; a promise is waited for."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until the page has drawn itself."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setEmulatedMedia", features=scheme)
        self.requests.clear(), self.errors.clear()
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.until("document.documentElement?.hasAttribute('data-ready') && document.readyState === 'complete'")

    def until(self, condition: str, seconds: float = 120) -> None:
        end = time.perf_counter() + seconds
        while not self.js(condition):
            assert not self.errors and time.perf_counter() < end, f"never true: {condition}; {self.errors}"
            time.sleep(0.02)

    def key(self, name: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent", type=kind, key=name, **({"text": text} if text and kind == "keyDown" else {})
            )

    def screenshot(self, path: Path, whole: bool = False) -> None:
        picture = self("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.out), os.close(self.inn)
