"""The page in a browser: clicks, keys, addresses, decisions; no console errors, no request off the machine."""

import json
import re
import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from web_pages import TOKEN, TRAIN, WRONG, previews, recipe

import gradkeep as gk
from gradkeep.web._app import create_app
from gradkeep.web._guard import Access
from gradkeep.web._report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium here: apt-get install chromium"
)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def serving(folder, **values):
    """The page of a store on a free port, in a thread of this process."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = create_app(folder, access=Access(TOKEN, port=port), **values)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


@pytest.fixture(scope="module")
def site(master, tmp_path_factory):
    """The address of a page about a copy of the store, and the copy."""
    folder = shutil.copytree(master, tmp_path_factory.mktemp("site") / "digits")
    with serving(folder, data=previews(), recipe=recipe()) as url:
        yield url, folder


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@contextmanager
def watched(browser, **options):
    """A page whose errors, and requests to elsewhere, fail the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    page = context.new_page()
    page.set_default_timeout(15_000)
    wrong = []
    page.on("console", lambda answer: wrong.append(answer.text) if answer.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda queries: (
            None
            if re.match(r"(http://127\.0\.0\.1[:/]|data:|file:|blob:)", queries.url)
            else wrong.append(queries.url)
        ),
    )
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def page(browser):
    with watched(browser) as opened:
        yield opened


def test_runs_and_from_there_by_keys(page, site):
    url, _ = site
    page.goto(url)
    page.get_by_role("heading", name="Runs").wait_for()
    assert page.locator("table.list tbody tr").count() == 2
    page.locator(".chart canvas").first.wait_for()
    page.get_by_role("link", name="losses").click()
    assert page.url.endswith("#/run/losses/runs")
    page.keyboard.press("j")
    assert page.url.endswith("#/run/main/runs")
    for key, title in (("s", "Suspect labels"), ("e", "Evaluation"), ("t", "Store"), ("r", "Runs")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.get_by_role("heading", name=title, exact=True).wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")


def test_why_is_picked_filtered_compared_and_kept_in_the_address(page, site, browser):
    url, folder = site
    page.goto(f"{url}/#/run/main/why")
    page.locator(".scored.plus").first.wait_for()
    first = page.url
    assert "/why/0" in first
    page.keyboard.press("j")
    page.get_by_role("heading", name="test 1", exact=True).wait_for()
    page.get_by_role("button", name=re.compile("^wrong")).click()
    page.locator(".picker-list .query").first.wait_for()
    page.keyboard.press("x")
    page.locator(".facts", has_text="wrong").first.wait_for()
    page.goto(f"{url}/#/run/main/why/7")
    page.get_by_role("heading", name="test 7", exact=True).wait_for()
    page.get_by_label("Rows on each side").fill("3")
    page.locator(".scored.plus").nth(2).wait_for()
    page.locator(".scored.plus").nth(3).wait_for(state="detached")
    page.get_by_role("button", name="+ compare").click()
    page.locator(".answer").nth(1).wait_for()
    page.get_by_role("combobox", name="Method").nth(1).select_option("method:dot")
    page.locator('.answer[aria-label="method:dot"] .scored.minus').first.wait_for()
    page.get_by_role("button", name="groups").first.click()
    page.locator(".answer").first.locator(".groups li, p.muted").first.wait_for()
    dot = page.locator('.answer[aria-label="method:dot"]')
    dot.get_by_role("button", name="layers").click()
    page.locator(".heat").first.wait_for()
    scores = gk.attribute(folder, method="dot", checkpoints="epoch-12")
    best = scores.top(1, query=7).ids[0]
    assert dot.locator(".scored.plus .id").first.inner_text() == f"#{best}"
    assert dot.locator(".scored.plus .share").first.inner_text().startswith("+")
    assert dot.locator(".scored.minus .share").first.inner_text().startswith("\u2212")
    shown = dot.inner_text()
    with watched(browser) as other:  # a colleague opens the address
        other.goto(page.url)
        answer = other.locator('.answer[aria-label="method:dot"]')
        answer.locator(".heat").wait_for()
        assert answer.inner_text() == shown
        assert other.locator(".scored.plus").count() == 6


def test_why_explains_another_label_and_searches(page, site):
    url, _ = site
    page.goto(f"{url}/#/run/main/why/7")
    page.get_by_role("button", name="three", exact=True).click()
    page.get_by_role("heading", name="test-as-3 7", exact=True).wait_for()
    assert "queries=test-as-3" in page.url
    page.goto(f"{url}/#/run/main/why/7?source=method:kernel")
    page.keyboard.press("/")
    page.keyboard.type("seven")
    page.locator(".picker-list .n", has_text=re.compile(r"^\d+$")).first.wait_for()
    page.locator(".picker-list b", has_text="seven").first.wait_for()
    page.locator(".picker-list b", has_text="one").first.wait_for(state="detached")


def test_why_says_what_is_wrong_in_its_place(browser, site):
    url, _ = site
    context = browser.new_context()
    page = context.new_page()  # a refused request is an error in the browser's console
    page.goto(f"{url}/#/run/main/why/99999")
    page.get_by_role("alert").get_by_text("has no row 99999").wait_for()
    page.goto(f"{url}/#/run/main/why/abc")
    page.get_by_role("alert").get_by_text("no id").wait_for()
    page.goto(f"{url}/#/run/main/why/7?source=method:adam")
    page.locator(".answer").get_by_role("alert").wait_for()
    page.get_by_role("heading", name="test 7").wait_for()
    context.close()


def test_suspects_are_decided_by_keys_undone_after_a_reload_and_exported(page, site):
    url, folder = site
    page.goto(f"{url}/#/run/main/suspects")
    page.locator(".queue .query.on").wait_for()
    ranked = gk.suspects(folder, checkpoints=["epoch-04", "epoch-12"]).ids
    heading = page.locator(".current h2")
    assert str(ranked[0]) in heading.inner_text()
    page.keyboard.press("a")
    page.locator(".current h2", has_text=re.compile(rf"\b{ranked[1]}\b")).wait_for()
    page.keyboard.press("r")
    page.get_by_role("group", name="The right label").wait_for()
    page.keyboard.press("5")
    page.locator(".current h2", has_text=re.compile(rf"\b{ranked[2]}\b")).wait_for()
    page.keyboard.press("r")
    page.keyboard.press("Enter")
    page.locator(".facts", has_text="3 decided").wait_for()
    log = gk.open(folder).decisions("train")
    assert [(one.row, one.action, one.label) for one in log] == [
        (ranked[0], "accept", None),
        (ranked[1], "relabel", 5),
        (ranked[2], "relabel", None),
    ]
    page.reload()
    page.locator(".queue .badge").nth(2).wait_for()
    page.keyboard.press("k")
    page.locator(".current h2", has_text=re.compile(rf"\b{ranked[2]}\b")).wait_for()
    page.keyboard.press("u")
    page.locator(".facts", has_text="2 decided").wait_for()
    assert gk.open(folder).decisions("train")[-1].action == "undo"
    with page.expect_download() as answer:
        page.get_by_role("link", name="JSON").click()
    exported = json.loads(Path(answer.value.path()).read_text())
    assert [one["id"] for one in exported["decisions"]] == [ranked[0], ranked[1]]
    with page.expect_download() as answer:
        page.get_by_role("link", name="CSV").click()
    assert Path(answer.value.path()).read_text().splitlines()[0].startswith("id,action")
    page.get_by_role("button", name="open", exact=True).click()
    page.locator(".queue .query").first.wait_for()
    assert "show=open" in page.url
    page.get_by_label("Measure").select_option("self")
    assert "by=self" in page.url


def test_suspects_suggest_and_retrain(page, site):
    url, _ = site
    page.goto(f"{url}/#/run/main/suspects/{WRONG[0]}")
    page.get_by_role("button", name="ask models that never saw the rows").click()
    page.get_by_text("suggestion").first.wait_for()
    page.keyboard.press("r")
    page.locator(".chooser .best").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="wrong r").click()
    page.locator(".chooser button").nth(2).click()
    page.get_by_role("button", name="retrain").click()
    page.locator(".verdict").wait_for()
    assert "gain over random rows" in page.locator(".verdict").inner_text()
    # It was about the decisions of then: after another one nothing is asked that was not begun.
    page.get_by_role("button", name="wrong r").click()
    page.locator(".chooser button").nth(1).click()
    page.locator(".verdict").wait_for(state="hidden")
    page.get_by_role("button", name="retrain").click()
    page.locator(".verdict").wait_for()


def test_clusters_are_drawn_around_and_set_against_each_other(page, site):
    url, _ = site
    page.goto(f"{url}/#/run/main/clusters")
    canvas = page.locator(".map canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    corners = ((0.02, 0.02), (0.98, 0.02), (0.98, 0.98), (0.02, 0.98), (0.02, 0.1))
    for place, (x, y) in enumerate(corners):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=3)
        if not place:
            page.mouse.down()
    page.mouse.up()
    page.get_by_role("heading", name=f"Drawn around {TRAIN}").wait_for()
    page.locator(".grid img").first.wait_for()
    page.locator(".legend button").nth(1).click()
    page.get_by_role("heading", name=re.compile("Cluster 2")).wait_for()
    assert "show=1" in page.url
    page.keyboard.press("j")
    page.get_by_role("heading", name=re.compile("Cluster 3")).wait_for()
    if page.locator(".opposed button").count():
        page.locator(".opposed button").first.click()
        page.locator(".members").nth(1).wait_for()
    address = page.url
    page.goto(f"{url}/#/run/main/runs")
    page.goto(address)
    page.locator(".members").first.wait_for()


def test_a_budget_is_moved_and_told_in_a_sentence(page, site):
    url, _ = site
    page.goto(f"{url}/#/run/main/memory")
    page.locator(".sentence", has_text="At 50% of its memory").wait_for()
    page.keyboard.press("k")
    page.locator(".sentence", has_text="At 55% of its memory").wait_for()
    assert "budget=0.55" in page.url
    page.get_by_role("slider", name="Budget").fill("0.9")
    page.locator(".sentence", has_text="At 90% of its memory").wait_for()
    page.get_by_label("Heuristic").select_option("lru")
    page.locator(".sentence", has_text="At 90%").wait_for()
    assert page.locator(".chart canvas").count() == 2


def test_evaluations_and_the_store(page, site):
    url, _ = site
    page.goto(f"{url}/#/run/main/evaluation")
    page.get_by_role("button", name=re.compile("^kernel")).click()
    page.get_by_text("held against").wait_for()
    assert "/evaluation/lds-kernel" in page.url
    page.goto(f"{url}/#/run/main/store")
    page.get_by_role("button", name="verify every byte").click()
    page.get_by_text("\u2713 sound").wait_for()
    page.locator("tr", has_text="epoch-04/train").click()
    page.locator(".panel", has_text="epoch-04/train").wait_for()
    assert page.locator(".panel td", has_text="Linear").count() == 2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_screen_fits_its_width_in_both_colours(browser, site, scheme, width):
    url, _ = site
    size = {"width": width, "height": 840}
    with watched(browser, viewport=size, color_scheme=scheme) as page:
        screens = ("runs", "why/7", "suspects", "clusters", "memory", "evaluation", "store")
        for screen in screens:
            page.goto(f"{url}/#/run/main/{screen}")
            page.locator("main h1").first.wait_for()
            page.locator(".working").first.wait_for(state="detached")
            wide = page.locator("html").evaluate("(element) => element.scrollWidth")
            assert wide <= width, screen
            paper = page.locator("body").evaluate(
                "(element) => getComputedStyle(element).backgroundColor"
            )
            assert (paper == "rgb(21, 21, 20)") == (scheme == "dark")


def test_an_empty_store_names_the_commands(browser, tmp_path):
    gk.open(tmp_path / "new")
    with serving(tmp_path / "new") as url, watched(browser) as page:
        for screen, command in (
            ("runs", "gradkeep capture"),
            ("why", "gradkeep capture"),
            ("suspects", "gradkeep capture"),
            ("clusters", "gradkeep capture"),
            ("memory", "gradkeep remat record"),
            ("evaluation", "gradkeep evaluate"),
            ("store", "gradkeep capture"),
        ):
            page.goto(f"{url}/#/run/main/{screen}")
            page.locator(".empty code", has_text=command).first.wait_for()


def test_the_report_tells_the_same_without_a_server(browser, master, tmp_path):
    path = write_report(master, tmp_path / "report.html", data=previews())
    with watched(browser) as page:
        page.on(
            "request",
            lambda queries: pytest.fail(queries.url) if queries.url.startswith("http") else None,
        )
        page.goto(path.as_uri())
        page.get_by_role("heading", name="Runs").wait_for()
        page.goto(f"{path.as_uri()}#/run/main/why")
        page.locator(".scored.plus").first.wait_for()
        page.keyboard.press("j")
        page.locator(".scored.minus").first.wait_for()
        page.get_by_role("button", name="groups").click()
        page.locator(".answer .groups li, .answer p.muted").first.wait_for()
        for screen in ("suspects", "clusters", "memory", "evaluation", "store"):
            page.goto(f"{path.as_uri()}#/run/main/{screen}")
            page.locator("main h1").first.wait_for()
            page.locator(".working").first.wait_for(state="detached")
            assert page.locator(".problem").count() == 0, screen
        page.goto(f"{path.as_uri()}#/run/main/clusters?show=0")
        page.locator(".grid img").first.wait_for()
