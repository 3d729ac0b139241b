"""The pictures of the documentation: two themes that show the same, and words for those who see neither."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.drawings import first_call, overview, rooms, themes
from tests.docs.pages import PAGES
from tests.support.paths import ROOT
from tests.support.rooms import PACKAGE

PICTURES = ROOT / "docs" / "pictures"
LIGHT = sorted(path for path in PICTURES.glob("*.svg") if not path.stem.endswith("-dark"))
#: A text alternative with fewer words names a picture, but does not say what one sees.
FEWEST_WORDS = 10


def facts(path: Path) -> str:
    """What a picture shows, as its script wrote it into the file."""
    found = themes.facts_of(path)
    assert found, f"{path.name}: no facts; its script must save it with themes.save"
    return str(found)


def drawn(path: Path) -> list[tuple[str, ...]]:
    """The points of each shape of a picture, once: drawn paper is closed with another line than absent paper."""
    text = path.read_text(encoding="utf-8").partition("</metadata>")[2]
    shapes = re.findall(r'<path d="([^"]+)"', text)
    places = re.findall(r'<use [^>]*?x="([^"]+)" y="([^"]+)"', text)
    return sorted([*(tuple(dict.fromkeys(re.findall(r"-?[\d.]+ -?[\d.]+", shape))) for shape in shapes), *places])


def colours(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return {found.lower() for found in re.findall(r"(?:fill|stroke): (#[0-9a-fA-F]{6})", text)}


def luminance(colour: str) -> float:
    """The relative luminance of a colour: 0 is black, 1 is white."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def alternatives() -> list[tuple[str, str, str]]:
    """Page, picture and text alternative of every picture on a page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for words, picture in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", text):
            found.append((page.name, Path(picture).name, words))
        for picture, words in re.findall(r'<img src="([^"]+)" alt="([^"]*)"', text):
            found.append((page.name, Path(picture).name, words))
    return found


def test_every_picture_has_a_dark_twin() -> None:
    dark = {path.name for path in PICTURES.glob("*-dark.svg")}
    assert dark == {themes.twin(path).name for path in LIGHT}
    assert len(LIGHT) > 5


@pytest.mark.parametrize("light", LIGHT, ids=lambda path: path.stem)
def test_both_themes_show_the_same(light: Path) -> None:
    dark = themes.twin(light)
    assert facts(light) == facts(dark)
    assert drawn(light) == drawn(dark)
    assert len(drawn(light)) > 20


@pytest.mark.parametrize("light", LIGHT, ids=lambda path: path.stem)
def test_the_ink_is_dark_on_light_paper_and_light_on_dark(light: Path) -> None:
    """Text without a colour of its own is black in an SVG, so every text of the dark theme needs one."""
    for path in (light, themes.twin(light)):
        ink = re.findall(r'<g id="text_\d+">.*?</g>\n *</g>', path.read_text(encoding="utf-8"), re.DOTALL)
        assert ink and not [text for text in ink if "fill: #" not in text and "stroke: #" not in text]
        assert "#000000" not in colours(path)
    assert "#ffffff" in colours(light) and "#ffffff" not in colours(themes.twin(light))
    assert max(map(luminance, colours(themes.twin(light)))) > 0.5 > 0.1 > min(map(luminance, colours(light)))


def test_every_picture_is_on_a_page_with_words_that_say_what_one_sees() -> None:
    found = alternatives()
    assert {picture for _, picture, _ in found} == {path.name for path in LIGHT}
    assert [(page, picture) for page, picture, words in found if len(words.split()) < FEWEST_WORDS] == []


def test_the_words_about_the_readme_s_picture_are_true() -> None:
    document = json.loads(overview.COUNTS.read_text(encoding="utf-8"))
    assert facts(overview.PICTURE) == overview.facts(document)
    said = re.search(r"every median is below ([\d.]+)\.", (ROOT / "README.md").read_text(encoding="utf-8"))
    medians = [float(found) for found in re.findall(r" ([\d.]+) \(\d+\)", overview.facts(document))]
    assert said is not None and len(medians) == len(overview.bytes_over_floor(document["rows"]))
    assert max(medians) < float(said[1])


def test_the_readme_shows_the_twin_to_readers_with_a_dark_theme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    light = re.findall(r'<img src="docs/pictures/(\S+)\.svg"', readme)
    dark = re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="docs/pictures/(\S+)-dark\.svg"', readme)
    assert light == dark != []


# ---- the architecture -----------------------------------------------------------------------------------------------

ARCHITECTURE = ROOT / "docs" / "contributing" / "architecture.md"


def test_the_picture_of_the_rooms_shows_every_room_and_every_import() -> None:
    told = rooms.facts()
    assert json.loads(facts(rooms.PICTURE)) == json.loads(json.dumps(told)), "run python docs/drawings/rooms.py"
    shown = {name for floor in told["rooms"] for name in floor}
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert shown == folders | {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert shown | {"tuning", *told["kernels"]} == {*rooms.CONTENTS}
    assert len(told["imports"]) > 40 and ["runtime", "tiling"] in told["imports"]
    for path in (rooms.PICTURE, themes.twin(rooms.PICTURE)):
        groups = re.findall(r'\n( *)<g id="PathCollection_\d+">(.*?)\n\1</g>', path.read_text("utf-8"), re.DOTALL)
        dots = [group.count("<use ") for _, group in groups]
        assert dots == [len(told["imports"]), len(told["includes"])]


def test_the_steps_of_the_picture_are_those_of_a_recorded_call() -> None:
    assert json.loads(facts(first_call.PICTURE)) == first_call.facts(), "run python docs/drawings/first_call.py"
    places = first_call.places(first_call.recorded())
    assert places == sorted(places) and len(set(places)) == len(first_call.STEPS) > 10
    assert {step.room for step in first_call.STEPS} == {*first_call.ROOMS}


def test_steps_in_another_order_are_an_error() -> None:
    calls = [(step.file, step.function) for step in first_call.STEPS]
    assert first_call.places(calls) == list(range(len(calls)))
    with pytest.raises(ValueError, match="another order"):
        first_call.places([calls[1], calls[0], *calls[2:]])
    with pytest.raises(ValueError, match="not in list"):
        first_call.places(calls[1:])


def test_the_numbered_words_name_the_steps_of_the_picture() -> None:
    numbered = re.findall(r"^(\d+)\. `(\S+)` in `(\S+)`", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [(str(number), step.function, step.file) for number, step in enumerate(first_call.STEPS, 1)]
    assert numbered == wanted
