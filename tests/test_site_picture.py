"""The picture in the README is what `python -m bench.picture` draws from the result files."""

from __future__ import annotations

from bench.peers import OURS
from bench.picture import CASES, NAMES, PICTURE, drawn, medians, picture
from tests.processes import ROOT


def test_the_picture_is_drawn_from_the_result_files() -> None:
    assert picture() == PICTURE.read_text()


def test_the_readme_shows_the_picture() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_each_arm_of_each_case_has_a_bar_and_ours_is_emphasized() -> None:
    figure = drawn()

    for axes, (_, file, case) in zip(figure.axes, CASES, strict=True):
        seconds = medians(file, case)
        assert list(seconds.values()) == [bar.get_width() for bar in axes.patches]
        assert [NAMES.get(arm, arm) for arm in seconds] == [label.get_text() for label in axes.get_yticklabels()]
        assert [arm == OURS for arm in seconds] == [text.get_weight() == "bold" for text in axes.texts]


def test_no_text_is_cut() -> None:
    figure = drawn()
    figure.canvas.draw()

    edges = figure.bbox
    for text in (*figure.texts, *(text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels()))):
        box = text.get_window_extent()
        assert edges.x0 <= box.x0, text
        assert box.x1 <= edges.x1, text
        assert edges.y0 <= box.y0, text
        assert box.y1 <= edges.y1, text
