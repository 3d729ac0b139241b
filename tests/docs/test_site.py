"""The site: it builds without a warning, its links lead somewhere, and a browser shows it without sideways scrolling.

The tests need the extras ``docs`` and ``torch``. Those in a browser also need playwright and chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from filelock import FileLock

from tests.support.paths import ROOT

NEEDED = {
    "sphinx": "docs",
    "numpydoc": "docs",
    "myst_parser": "docs",
    "pydata_sphinx_theme": "docs",
    "sphinx_gallery": "docs",
    "torch": "torch",
}
MISSING = {f"cunorm[{extra}]" for module, extra in NEEDED.items() if find_spec(module) is None}
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(sorted(MISSING))}")

PHONE, DESK = 390, 1280  # CSS pixels
ANSWER = "guide/pytorch.html#make-the-groupnorms-of-your-model-faster"
#: Elements that scroll sideways in themselves, or make the page do it. Tables may.
SIDEWAYS = """() => {
  const found = [];
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page");
  for (const one of document.querySelectorAll("main *")) {
    const style = getComputedStyle(one);
    if (one.closest("table, .pst-scrollable-table-container") || one.querySelector("table")) continue;
    if (["auto", "scroll", "hidden"].includes(style.overflowX) && one.scrollWidth > one.clientWidth + 1
        && one.clientWidth > 1) {
      found.push(`${one.tagName} ${one.className} ${one.textContent.trim().slice(0, 60)}`);
    }
  }
  return found;
}"""


@dataclass
class Page(HTMLParser):
    """The links, anchors, pictures and resources of a page."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    pictures: list[dict[str, str | None]] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for name, value in attrs if name in ("id", "name") and value}
        if tag == "a" and named.get("href"):
            self.links.append(str(named["href"]))
        if tag == "img":
            self.pictures.append(named)
        if tag in ("script", "img", "source", "iframe") and named.get("src"):
            self.resources.append(str(named["src"]))
        if tag == "link" and named.get("rel") in ("stylesheet", "preload", "icon"):
            self.resources.append(str(named["href"]))


def build(folder: Path) -> None:
    """Run the README's command, with another folder for the site."""
    command = re.search(r"`sphinx-build (.*) docs/_build`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert command is not None
    run = [sys.executable, "-m", "sphinx", *command[1].split(), "-q", "--keep-going", str(folder)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, which the workers of pytest-xdist share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        build(folder := tmp_path_factory.mktemp("site"))
        return folder
    shared = tmp_path_factory.getbasetemp().parent
    with FileLock(shared / "site.lock"):
        if not (shared / "built").exists():
            build(shared / "site")
            (shared / "built").touch()
    return shared / "site"


@cache
def pages(site: Path) -> dict[str, Page]:
    """Each page of the site by its path, apart from the search page, which a script fills."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if not name.startswith("_static/"):
            found[name] = Page()
            found[name].feed(path.read_text(encoding="utf-8"))
    return found


def target(page: str, link: str) -> tuple[str, str] | None:
    """The file and the anchor to which a link of a page leads; None outside the site."""
    parts = urlsplit(urljoin(f"http://site/{page}", link))
    if parts.netloc != "site" or parts.scheme != "http":
        return None
    return unquote(parts.path.lstrip("/")), unquote(parts.fragment)


def test_the_target_of_every_link_exists(site: Path) -> None:
    found, wrong = pages(site), []
    for name, page in found.items():
        for link in [*page.links, *page.resources, *(str(one["src"]) for one in page.pictures)]:
            if (to := target(name, link)) is None:
                continue
            path, anchor = to
            there = not path or (site / path).exists()
            if there and anchor and path in found:
                there = anchor in found[path].anchors
            if not there:
                wrong.append(f"{name}: {link}")
    assert len(found) > 60
    assert not wrong


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    assert not [
        (name, one) for name, page in pages(site).items() for one in page.resources if target(name, one) is None
    ]


def test_every_picture_has_a_text_alternative(site: Path) -> None:
    drawn = [(name, one) for name, page in pages(site).items() for one in page.pictures]
    assert len(drawn) > 10
    assert not [(name, one["src"]) for name, one in drawn if len((one.get("alt") or "").split()) < 4]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import cunorm.ascend
    import cunorm.distributed
    import cunorm.torch
    from cunorm import reference

    anchors = set().union(*(page.anchors for page in pages(site).values()))
    modules = (cunorm, cunorm.torch, cunorm.distributed, cunorm.ascend, reference)
    names = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert not {name for name in names if not {name, f"module-{name}"} & anchors} - {"cunorm.torch.functional"}


def test_two_clicks_lead_to_the_answer_for_a_model(site: Path) -> None:
    """How do I make my GroupNorm faster in my own model? A heading answers it, on a page that the first page links."""
    found = pages(site)
    path, anchor = ANSWER.split("#")
    assert anchor in found[path].anchors
    first = {to[0] for link in found["index.html"].links if (to := target("index.html", link))}
    assert path in first


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(site))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_only_tables_scroll_sideways(site: Path, address: str, width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="not installed: pip install playwright")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("chromium is not installed: apt install chromium")
    wrong = []
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        for name in pages(site):
            tab.goto(f"{address}/{name}")
            wrong += [f"{name}: {one}" for one in tab.evaluate(SIDEWAYS)]
        browser.close()
    assert not wrong
    assert not errors
