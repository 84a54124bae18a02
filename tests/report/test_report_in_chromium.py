"""The page as Chromium shows it: at a desk and on a phone, in light, in dark and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_pipe import Chromium, NoChromium, Page, first_that_works
from report_runs import HOSTILE, evaluation, make_corpus, make_store, make_training, write_evaluation

from eyas.config import load
from eyas.report import write_report

WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    folder = tmp_path_factory.mktemp("chromium")
    try:
        started = first_that_works(folder)
    except NoChromium as error:
        pytest.skip(str(error))
    with started:
        yield started
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def page_file(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(whole_run, out=path)
    return path


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that would be markup, many long series, numbers large and small."""
    run = tmp_path_factory.mktemp("hostile") / ("x" * 120)
    make_store(make_corpus(run / "corpus", sources=(*HOSTILE, "y" * 300)), run / "store")
    make_training(run / "train", steps=20_000, every=10, lr=1e-5, target="t/" * 90)
    for number, name in enumerate(HOSTILE):
        document = evaluation("live", name, benchmark=name, head=name)
        rows = [{**row, "tokens_per_s": 1e6 * (number + 1), "ttft_ms": 1e-4} for row in document["results"]]
        write_evaluation(run, str(number), {**document, "results": rows})
    path = run / "report.html"
    write_report(run, cfg=load(overrides=["report.title=" + "w" * 200]))
    return path


def opened(browser: Chromium, path: Path, width: int, *, dark: bool = False) -> Page:
    return browser.open(path, width=width, dark=dark, mobile=width < 600)


CHARTS = """[...document.querySelectorAll('svg.chart')].map((one) => {
  const box = one.getBoundingClientRect();
  return [one.getAttribute('aria-label'), box.x, box.y + scrollY, box.width, box.height];
})"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_can_be_seen(browser: Chromium, page_file: Path, width: int, dark: bool) -> None:
    page = opened(browser, page_file, width, dark=dark)
    charts = page.value(CHARTS)
    assert len(charts) == 17
    edge = [0, 0, 8, 2000]  # the page itself, beside its cards
    whole, page_itself, *drawn = page.look([edge, *(box for _, *box in charts)])
    assert whole.light < 60 if dark else whole.light > 200
    assert page_itself.light < 30 if dark else page_itself.light > 240
    for (name, _, _, across, high), seen in zip(charts, drawn, strict=True):
        assert across > 250 and high > 80, name
        assert seen.coloured > 0.0005 and seen.colours > 8, f"nothing drawn: {name}"
    assert page.requests == [page_file.resolve().as_uri()]
    assert page.complaints == []


#: Words that are cut off, stick out of their plot, or lie on one another.
FAULTS = """
(() => {
  const faults = [], seen = (element) => element.getBoundingClientRect();
  if (document.documentElement.scrollWidth > innerWidth) faults.push('the page is wider than the window');
  for (const element of document.querySelectorAll('h1,h2,h3,p,dt,dd,li,figcaption,summary,pre,button,.value')) {
    if (element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline')
      faults.push('cut off: ' + element.textContent.slice(0, 60));
    const box = seen(element);
    if (box.width && (box.left < 0 || box.right > innerWidth + 1))
      faults.push('outside: ' + element.textContent.slice(0, 60));
  }
  for (const chart of document.querySelectorAll('svg.chart')) {
    const frame = seen(chart), words = [...chart.querySelectorAll('text')];
    const name = chart.getAttribute('aria-label').slice(0, 40);
    for (const word of words) {
      const box = seen(word);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1)
        faults.push(name + ' cuts off ' + word.textContent.slice(0, 40));
      for (const other of words) {
        if (other === word || other.compareDocumentPosition(word) & Node.DOCUMENT_POSITION_PRECEDING) continue;
        const that = seen(other);
        const across = Math.min(box.right, that.right) - Math.max(box.left, that.left);
        const down = Math.min(box.bottom, that.bottom) - Math.max(box.top, that.top);
        if (across > 1 && down > 4)
          faults.push(name + ': ' + word.textContent + ' lies on ' + other.textContent);
      }
    }
  }
  return faults;
})()
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_cut_off_or_lies_on_another(browser: Chromium, page_file: Path, width: int) -> None:
    assert opened(browser, page_file, width).value(FAULTS) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names_and_long_ones_change_nothing(browser: Chromium, hostile_file: Path, width: int) -> None:
    page = opened(browser, hostile_file, width)
    assert page.value(FAULTS) == []
    assert page.value("document.querySelectorAll('img, b, object, script:not(:last-child)').length") == 0
    assert page.requests == [hostile_file.resolve().as_uri()]
    assert page.complaints == []


def test_what_gets_in_is_not_run(browser: Chromium, page_file: Path, tmp_path: Path) -> None:
    """Were a name to become markup after all, the content policy would stop it."""
    text = page_file.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    bad = "<main><script>document.title = 'taken'</script><img src='http://example.invalid/x'>"
    broken.write_text(text.replace("<main>", bad))
    page = browser.open(broken)
    assert page.value("document.title") != "taken"
    assert len([text for text in page.complaints if "Content Security Policy" in text]) == 2
    assert page.value("document.getElementById('theme').hidden") is False  # our own script has run


def test_the_button_turns_the_page_over(browser: Chromium, page_file: Path) -> None:
    page = opened(browser, page_file, 1280)
    lights = []
    for _ in range(3):
        lights.append(page.look(height=900)[0].light)
        page.value("document.getElementById('theme').click()")
    assert lights[0] > 200
    assert lights[1] < 60
    assert lights[2] == lights[0]
    page.prefer(dark=True)  # whoever prefers dark may still have it light
    assert page.look(height=900)[0].light < 60
    page.value("document.getElementById('theme').click()")
    assert page.look(height=900)[0].light > 200


def test_paper_is_white_whatever_the_screen_is(browser: Chromium, page_file: Path) -> None:
    page = opened(browser, page_file, 1280, dark=True)
    page.prefer(dark=True, media="print")
    assert page.look(height=900)[0].light > 220
    assert page.value("getComputedStyle(document.getElementById('theme')).display") == "none"
    pdf = page.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 50_000


def test_colours_can_be_told_apart_and_text_can_be_read(browser: Chromium, page_file: Path) -> None:
    """WCAG's contrast: 4.5 for text, 3 for lines, on the card they lie on."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for dark in (False, True):
        page = opened(browser, page_file, 1280, dark=dark)
        style = "getComputedStyle(document.documentElement).getPropertyValue"
        names = ("card", "text", "muted", "link", "good", "bad", *(f"c{i}" for i in range(7)))
        card, *others = [page.value(f"{style}('--{name}').trim()") for name in names]
        for number, colour in enumerate(others):
            light, deep = sorted((luminance(colour), luminance(card)), reverse=True)
            assert (light + 0.05) / (deep + 0.05) > (4.5 if number < 5 else 3.0), (dark, colour)
        assert len(set(others[5:])) == 7
