"""The monitor's page in a real browser: readable, live, on a phone, by keyboard; and other peers' text stays text."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.records import CONTRACT, NOW, progress, seen, told, told_round

from opendiloco.claims import ToldEvaluation
from opendiloco.config import ModelConfig
from opendiloco.monitor.archive import Archive
from opendiloco.monitor.board import Board
from opendiloco.monitor.sights import Sights
from opendiloco.monitor.snapshot import snapshot
from opendiloco.monitor.troubles import Trouble
from opendiloco.monitor.web import listen, serve

if TYPE_CHECKING:
    from support.waiting import WaitUntil

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:  # a browser is more than a user of the package needs
    pytest.skip("no chromium: apt install chromium chromium-driver", allow_module_level=True)

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
*PEERS, FOURTH = ["12D3KooW" + letter * 44 for letter in "ABCD"]
PHONE = (375, 700)


class Page:
    """A page that is served from this process, and a browser that shows it."""

    def __init__(self, browser: Any) -> None:
        self.browser, self._sights = browser, Sights()
        self.board, self._stop = Board(Archive()), threading.Event()
        self._up = threading.Event()
        self._listener = listen("0")
        self._thread = threading.Thread(
            target=lambda: serve(self._listener, self.board, self._watch), name="page of the test"
        )
        self.now = NOW

    def open(self, capfd: pytest.CaptureFixture[str], wait_until: WaitUntil) -> None:
        self._thread.start()
        said: list[str] = []
        wait_until(lambda: said.append(capfd.readouterr().err) or "shows the swarm" in "".join(said), "it is served")
        self.url = next(word for word in "".join(said).split() if word.startswith("http://"))
        self.browser.get(self.url)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()

    def _watch(self) -> None:
        self._stop.wait()

    def show(self, *, rounds: int, there: Sequence[str] = PEERS) -> None:
        """What a monitor has seen after so many rounds, of those who are `there` still."""
        self.now += 20
        contract = CONTRACT.model_copy(update={"model": ModelConfig.model_construct(name=HOSTILE)})
        workers = {
            peer: seen(
                progress(
                    contract=contract.digest,
                    round=rounds,
                    hashed_round=rounds,
                    issued=self.now - 1,
                    expected_finish=self.now + 5,
                ),
                told(
                    *(told_round(at, loss=3 - at / 10, share=1 / 3, sent_bytes=10**6) for at in range(1, rounds + 1)),
                    bandwidth=2e6,
                    evaluations=[
                        ToldEvaluation(round=at, loss=3.2 - at / 10, tokens=64) for at in range(1, rounds + 1)
                    ],
                ),
                until=self.now + 11,
            )
            for peer in there
        }
        self._sights.look(workers, self.now, [contract])
        shown = snapshot([contract], self._sights.workers, self.now)
        kept = tuple(one for one in shown.warnings if one.kind == "silent")
        self.board.take(self._sights.workers, replace(shown, warnings=(*kept, Trouble("nobody", HOSTILE))))

    def js(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).textContent"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()


def own_browsers() -> Iterator[psutil.Process]:
    """Processes of browsers that this run has started, whoever their parent is by now."""
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"].startswith("chrom") and process.environ().get("TMPDIR") == os.environ["TMPDIR"]:
                yield process


@pytest.fixture
def browser() -> Iterator[Any]:
    """One for each test: it starts processes as it likes, and a test has to leave none."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-breakpad",
        "--window-size=1200,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()
    psutil.wait_procs(list(own_browsers()), timeout=20)  # some of its processes end a moment after it


@pytest.fixture
def page(browser: Any, capfd: pytest.CaptureFixture[str], wait_until: WaitUntil) -> Iterator[Page]:
    page = Page(browser)
    page.open(capfd, wait_until)
    page.show(rounds=3)
    wait_until(lambda: page.text("#title") == "Run test", "it shows the run")
    yield page
    page.close()


def test_the_page_shows_the_run_and_follows_it(page: Page, wait_until: WaitUntil, tmp_path: Path) -> None:
    assert "3 of 9" in page.text("#glance")
    assert page.js("document.querySelectorAll('#workers tbody tr').length") == 3
    wait_until(lambda: page.js("document.querySelectorAll('.chart .main-svg').length > 9"), "all charts are drawn")
    names = page.js("document.getElementById('loss').data.map((trace) => trace.name)")
    assert names == [*(peer[-10:] for peer in PEERS), "validation"]
    assert page.js("document.getElementById('loss').data[0].x") == [1, 2, 3]
    page.show(rounds=4, there=PEERS[:2])
    wait_until(lambda: "4 of 9" in page.text("#glance"), "it has the next round")
    wait_until(lambda: page.js("document.getElementById('loss').data[0].x") == [1, 2, 3, 4], "so have the charts")
    assert "it has not been heard of" in page.text("#warnings")
    assert "silent" in page.text("#workers")
    assert page.js("document.getElementById('map').data.length") == 2
    assert [page.js(f"document.getElementById('{table}').rows.length") for table in ("loss-table", "map-table")] == [
        5,
        3,
    ]


def test_a_worker_has_one_colour_in_all_charts_and_the_validation_its_own(page: Page, wait_until: WaitUntil) -> None:
    wait_until(lambda: page.js("document.getElementById('map').data?.length") == 3, "all charts are drawn")
    page.show(rounds=4, there=[*PEERS[1:], FOURTH])
    wait_until(lambda: page.js("document.getElementById('loss').data.length") == 5, "a fourth is there")

    def colours(chart: str, part: str) -> dict[str, str]:
        return dict(page.js(f"document.getElementById('{chart}').data.map((one) => [one.name, one.{part}.color])"))

    lines, bars = colours("loss", "line"), colours("map", "marker")
    assert {name: lines[name] for name in bars} == bars
    assert len(set(lines.values())) == 5


def test_a_warning_is_announced_once_however_its_seconds_go_on(page: Page, wait_until: WaitUntil) -> None:
    def look(rounds: int, *, silent: bool) -> None:
        page.show(rounds=rounds, there=PEERS[:2] if silent else PEERS)
        wait_until(lambda: f"{rounds} of 9" in page.text("#glance"), "it has the next look")

    hears = "document.querySelectorAll('[aria-live], [role=status]')"
    page.js(
        f"(window.heard = [], {hears}.forEach((live) => new MutationObserver(() => heard.push(live.textContent))"
        ".observe(live, { childList: true, subtree: true, characterData: true })))"
    )
    look(4, silent=True)
    first = page.text("#warnings li")
    look(5, silent=True)
    assert "it has not been heard of" in first
    assert page.text("#warnings li") != first
    look(6, silent=False)
    heard = [words for words in page.js("heard") if words]
    assert heard == [first]


def test_text_of_others_is_shown_as_text_and_nothing_comes_from_other_hosts(page: Page, wait_until: WaitUntil) -> None:
    wait_until(lambda: page.js("document.querySelectorAll('.chart .main-svg').length > 9"), "all charts are drawn")
    assert HOSTILE in page.text("#about")
    assert HOSTILE in page.text("#warnings")
    assert page.js("document.querySelectorAll('img').length") == 0
    assert page.js("document.title") == "test: round 3"
    origins = page.js("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")
    assert set(origins) == {page.url.rstrip("/")}
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] != "INFO"] == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page: Page, wait_until: WaitUntil) -> None:
    from selenium.webdriver.common.by import By

    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": PHONE[0], "height": PHONE[1], "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        wait_until(lambda: page.js("innerWidth") == PHONE[0], "it is narrow")
        wait_until(lambda: page.js("document.querySelector('#loss .main-svg')?.clientWidth < innerWidth"), "charts fit")
        assert page.js("document.documentElement.scrollWidth") <= PHONE[0]
        for name in ("title", "glance", "workers-title", "loss-title"):
            assert page.browser.find_element(By.ID, name).is_displayed()
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_can_be_reached_by_keyboard(page: Page, wait_until: WaitUntil) -> None:
    from selenium.webdriver.common.keys import Keys

    def focused() -> str:
        return str(
            page.js("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )

    page.js("document.body.focus()")
    reached = []
    for _ in range(20):
        page.press(Keys.TAB)
        reached.append(focused())
        if reached[-1] == "measure":
            break
    assert reached[0] == "skip"
    assert "scroll" in reached
    page.press("p")  # of perplexity
    wait_until(
        lambda: page.js("document.getElementById('loss').layout.yaxis.title.text") == "perplexity", "it switched"
    )
    page.press(Keys.TAB)
    page.press(Keys.ENTER)
    wait_until(lambda: page.js("document.getElementById('loss-table').closest('details').open"), "the table is shown")


def test_a_monitor_that_looks_no_more_is_told_of(page: Page, wait_until: WaitUntil) -> None:
    page.js("(lookedAt = Date.now() - 29000, showAge())")
    assert page.text("#connection") == ""
    page.js("(lookedAt = Date.now() - 61000, showAge())")
    assert "The last look at the swarm was 61 s ago" in page.text("#connection")
    page.show(rounds=4)
    wait_until(lambda: page.text("#connection") == "", "it looks again")


def test_a_monitor_that_has_ended_is_told_of(page: Page, wait_until: WaitUntil) -> None:
    page.close()
    wait_until(lambda: "does not answer" in page.text("#connection"), "it says that it is old")
