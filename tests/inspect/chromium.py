"""A headless Chromium, driven over the two pipes of its DevTools protocol; no package needed."""

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # refused to root otherwise
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 60


def executable():
    """The first browser there is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Everything that the browser reports on its own is kept in ``events``."""

    def __init__(self, profile):
        self.events, self.last, self.unread = [], 0, b""
        read_by_browser, self.to_browser = os.pipe()
        self.from_browser, written_by_browser = os.pipe()
        arguments = [executable(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The browser wants its pipes under the numbers 3 and 4, which may be taken here.
        command = f"exec {shlex.join(arguments)} 3<&{read_by_browser} 4>&{written_by_browser}"
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            pass_fds=(read_by_browser, written_by_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_by_browser)
        os.close(written_by_browser)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        """End the browser and all of its processes, which are a group of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)

    def call(self, method, **params):
        """What the browser answers to a command."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def read(self, patience=PATIENCE):
        """The next message; events are kept on the way."""
        end = time.monotonic() + patience
        while b"\0" not in self.unread:
            left = max(0, end - time.monotonic())
            assert select.select([self.from_browser], [], [], left)[0], "the browser is silent"
            got = os.read(self.from_browser, 1 << 20)
            assert got, "the browser has ended"
            self.unread += got
        first, self.unread = self.unread.split(b"\0", 1)
        message = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message

    def wait_for(self, method):
        """Read until an event of this name has come since the last ``open``."""
        while not any(event["method"] == method for event in self.events):
            self.read()

    def open(self, path, width=1280, height=900, scripts=True):
        """A file in a window of this size, loaded and drawn."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.resize(width, height)
        self.events = []
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        if scripts:
            self.frames()

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def scheme(self, name):
        """light or dark, as the reader's system would say, and while the page is open."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.frames()

    def frames(self):
        """Two frames later, when observers have been called and their effects drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def run(self, expression):
        """The value of a JavaScript expression."""
        got = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def move(self, x, y):
        """The pointer to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.frames()

    def complaints(self):
        """Exceptions, and whatever was logged as a warning or an error, since ``open``."""
        thrown = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        said = [e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        return thrown + logged + [s for s in said if s["type"] in ("error", "warning", "assert")]

    def requests(self):
        """The addresses that the page asked for, since ``open``."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
