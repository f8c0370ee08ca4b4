"""The tables on the pages: well-known models, and predictions against measurements."""

from __future__ import annotations

import pytest

from bench import planned
from bench.model_sizes import MODELS, sizes_of, table
from bench.report import RESULTS
from tests.processes import ROOT

# In billions, as given by the publishers.
PARAMETERS = {
    "Llama 3.1 8B": 8.03,
    "gpt-oss 20B": 20.9,
    "Gemma 3 27B": 27.0,
    "Qwen3 30B-A3B": 30.5,
    "Qwen3 32B": 32.8,
    "Mixtral 8x7B": 46.7,
    "Llama 3.1 70B": 70.6,
    "gpt-oss 120B": 116.8,
    "Qwen3 235B-A22B": 235.1,
    "DeepSeek-V3 671B": 671.0,
    "Llama 3.1 405B": 405.9,
}


def test_the_page_contains_the_table():
    assert table() in (ROOT / "tutorials/index.md").read_text(encoding="utf-8")


def test_the_page_on_plans_contains_the_measured_figures():
    page = (ROOT / "tutorials/how-to/plan.md").read_text(encoding="utf-8")

    assert planned.table(RESULTS / "2026-11-29-plan.json") in page


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_their_published_number_of_parameters(name):
    assert PARAMETERS[name] == pytest.approx(sizes_of(name).parameters / 1e9, rel=0.005)


@pytest.mark.parametrize(("name", "active", "share"), [("gpt-oss 20B", 3.61, 4 / 32), ("gpt-oss 120B", 5.13, 4 / 128)])
def test_active_parameters_are_the_ones_a_token_is_multiplied_with(name, active, share):
    """As published, without the table from which a token takes one row; the experts among these are packed."""
    sizes = sizes_of(name)

    assert active == pytest.approx(sizes.multiplied(1) / 1e9, abs=0.005)
    assert sizes.routed * share * 4.25 / 8 == pytest.approx(sizes.needed_packed(1), rel=1e-4)
