"""Headless Chromium over its own pipe (the DevTools protocol, no port and no further package), and what can be seen.

with Chromium(folder) as browser:
    page = browser.open(path, width=1280)
    page.value("document.title"); page.pixels(); page.requests; page.complaints
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

#: Names under which it is installed.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WAIT_S = 60.0


def find_chromium() -> str | None:
    """The browser's program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with an empty profile; closed at the end, whatever happens.

    Args:
        program: as `find_chromium`.
        profile: a folder that does not exist yet.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self._program, self._profile = program, profile
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        theirs, self._out = os.pipe()
        self._in, their_out = os.pipe()

        # A shell puts the pipes where Chromium looks for them: descriptors 3 and 4.
        moved = f'exec "$0" "$@" 3</dev/fd/{theirs} 4>/dev/fd/{their_out}'
        flags = [*FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", moved, self._program, *flags],
            pass_fds=(theirs, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(their_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.eye = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False
    ) -> Page:
        """A page that has loaded, at that width and with that preference."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height, mobile=mobile)
        page.prefer(dark=dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(session, "Page.loadEventFired")
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One call; its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, session: str, method: str) -> None:
        """Until an event of that name has come."""
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        """The next message."""
        until = time.monotonic() + WAIT_S
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium says nothing")
            if not (more := os.read(self._in, 1 << 20)):
                raise RuntimeError(f"Chromium is gone, exit code {self._process.poll()}")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Seen(NamedTuple):
    """Pixels: their mean brightness, 0 to 255; the share of them that is no grey; how many colours there are."""

    light: float
    coloured: float
    colours: int


#: A PNG's pixels, by the browser's own decoder, in a page of its own.
_LOOK = """async (data, boxes) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], {type: 'image/png'}));
  const context = new OffscreenCanvas(picture.width, picture.height).getContext('2d');
  context.drawImage(picture, 0, 0);
  return [[0, 0, picture.width, picture.height], ...boxes].map(([x, y, width, height]) => {
    const pixels = context.getImageData(Math.ceil(x), Math.ceil(y), Math.floor(width), Math.floor(height)).data;
    const colours = new Set();
    let light = 0, coloured = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      const [r, g, b] = [pixels[i], pixels[i + 1], pixels[i + 2]];
      light += (r + g + b) / 3;
      coloured += Math.max(r, g, b) - Math.min(r, g, b) > 60;
      colours.add(65536 * r + 256 * g + b);
    }
    return [4 * light / pixels.length, 4 * coloured / pixels.length, colours.size];
  });
}"""


@dataclass
class Page:
    """A page in the browser."""

    browser: Chromium
    session: str

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def resize(self, width: int, height: int = 900, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, *, dark: bool = False, media: str = "") -> None:
        """A reader's preference, and the medium: `print` or the screen."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def png(self, *, top: float = 0, height: float | None = None) -> str:
        """The page as a picture, in base64: all of it, or a stripe."""
        width = self.value("innerWidth")
        height = height or self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        return self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]

    def look(self, boxes: Sequence[Sequence[float]] = (), *, height: float | None = None) -> list[Seen]:
        """What can be seen of the page as a whole, or down to a height, and then in each box: x, y, width, height."""
        call = f"({_LOOK})({json.dumps(self.png(height=height))}, {json.dumps(list(boxes))})"
        return [Seen(*numbers) for numbers in self.browser.eye.value(call)]

    @property
    def requests(self) -> list[str]:
        """Every URL that the page asked for, its own included."""
        return [event["params"]["request"]["url"] for event in self._mine("Network.requestWillBeSent")]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of scripts, of the console and of the browser itself, such as a content policy's."""
        thrown = [event["params"]["exceptionDetails"]["text"] for event in self._mine("Runtime.exceptionThrown")]
        said = [
            str(event["params"]["args"])
            for event in self._mine("Runtime.consoleAPICalled")
            if event["params"]["type"] in ("error", "warning", "assert")
        ]
        return thrown + said + [event["params"]["entry"]["text"] for event in self._mine("Log.entryAdded")]

    def _mine(self, method: str) -> list[dict[str, Any]]:
        return [e for e in self.browser.events if e.get("method") == method and e.get("sessionId") == self.session]
