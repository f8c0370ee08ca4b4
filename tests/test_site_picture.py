"""The picture in the README is what `python -m bench.picture` draws from the result files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from bench.peers import OURS
from bench.picture import CASES, PICTURE, medians, picture
from tests.processes import ROOT


def test_the_picture_is_that_of_the_result_files() -> None:
    assert picture() == PICTURE.read_text()


def test_the_readme_shows_the_picture() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_each_arm_of_each_case_has_a_bar() -> None:
    drawn = ElementTree.fromstring(picture())

    bars = [part for part in drawn if part.tag.endswith("rect")]
    arms = [arm for _, file, case in CASES for arm in medians(file, case)]
    assert len(arms) == len(bars)
    assert [arm == OURS for arm in arms] == [bar.get("class") == "ours" for bar in bars]
