"""Headless Chromium over its own pipe (the DevTools protocol, no port and no further package), and what can be seen.

with first_that_works(folder) as browser:
    page = browser.open(path, width=1280)
    page.value("document.title"); page.look(); page.requests; page.complaints
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
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
    "--disable-dev-shm-usage",  # containers have 64 MB there, and a tab that wants more dies
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WAIT_S = 60.0
#: All of one colour: whoever starts can load a file of ours, run a script and take a picture.
PROOF = "<!doctype html><title>seen</title><body style='margin: 0; background: #d00'>"


class NoChromium(Exception):
    """No program here can be used, and why."""


def find_chromiums() -> list[str]:
    """Programs that may be browsers; some are stubs that only say how to install one."""
    return [found for name in NAMES if (found := shutil.which(name))]


def first_that_works(folder: Path, programs: Sequence[str] | None = None, wait_s: float = WAIT_S) -> Chromium:
    """A browser that was started and has shown a file in `folder`; the caller closes it.

    Raises:
        NoChromium: none is installed, or none can do that: a stub, or one that is kept from our files.
    """
    reasons = []
    for number, program in enumerate(find_chromiums() if programs is None else programs):
        browser = Chromium(program, folder / f"profile-{number}", wait_s)
        try:
            browser.start()
            browser.prove(folder / "proof.html")
            return browser
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            browser.close(at_once=True)
            reasons.append(f"{program}: {type(error).__name__}: {error}")
        except BaseException:
            browser.close(at_once=True)
            raise
    raise NoChromium("; ".join(reasons) or "no Chromium here; on Debian: apt-get install chromium")


class Chromium:
    """One browser with an empty profile; closed at the end, whatever happens.

    Args:
        program: of `find_chromiums`.
        profile: a folder that does not exist yet.
        wait_s: longest silence.
    """

    def __init__(self, program: str, profile: Path, wait_s: float = WAIT_S) -> None:
        self._program, self._profile, self._wait_s = program, profile, wait_s
        self._number, self._buffer = 0, b""
        self._pipes: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.events: list[dict[str, Any]] = []

    def start(self) -> None:
        """Starts it, with a tab for looking at pictures."""
        theirs, self._out = os.pipe()
        self._in, their_out = os.pipe()
        self._pipes = [self._out, self._in]

        # A shell puts the pipes where Chromium looks for them: descriptors 3 and 4.
        moved = f'exec "$0" "$@" 3</dev/fd/{theirs} 4>/dev/fd/{their_out}'
        flags = [*FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", moved, self._program, *flags],
                pass_fds=(theirs, their_out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            os.close(their_out)
        self.eye = Page(self, self._tab())

    def prove(self, path: Path) -> None:
        """Has it show a page at `path`. Raises RuntimeError where that cannot be seen."""
        path.write_text(PROOF)
        page = self.open(path, width=64, height=64)
        if page.value("document.title") != "seen" or page.look(height=64)[0].coloured < 0.9:
            raise RuntimeError("it shows another page than it was told to")

    def close(self, *, at_once: bool = False) -> None:
        """Ends it, by the end of its pipe; by a signal where it does not hear or is not to be waited for."""
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        if self._process is None:
            return
        try:
            self._process.wait(0 if at_once else 10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False
    ) -> Page:
        """A page that has loaded, at that width and with that preference."""
        session = self._tab()
        page = Page(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Page.setLifecycleEventsEnabled", enabled=True)
        page.resize(width, height, mobile=mobile)
        page.prefer(dark=dark)
        went = page.call("Page.navigate", url=path.resolve().as_uri())
        if "errorText" in went:
            raise RuntimeError(f"{path}: {went['errorText']}")
        # Of this very document: the empty tab before it is told to have loaded, too, sooner or later.
        self.wait_for(session, "Page.lifecycleEvent", name="load", loaderId=went["loaderId"])
        return page

    def _tab(self) -> str:
        """A new tab's session."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        return self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

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

    def wait_for(self, session: str, method: str, **params: Any) -> None:
        """Until an event of that name has come that says so."""

        def came(event: dict[str, Any]) -> bool:
            of_it = event.get("method") == method and event.get("sessionId") == session
            return of_it and params.items() <= event["params"].items()

        while not any(map(came, self.events)):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        """The next message."""
        until = time.monotonic() + self._wait_s
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("it says nothing")
            if not (more := os.read(self._in, 1 << 20)):
                raise RuntimeError("it is gone")
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
