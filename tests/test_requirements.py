"""What the package asks for can be installed, beside the newest releases too, and `constraints.txt` fits together.

The requirements of torch are those of its builds for x86-64, of the public index (`requirements_of_torch.json`): the
build for the CPU alone asks for less. Those of all else are in the metadata of what is installed.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offload import torch_api, transformers_api
from tests.processes import ROOT

OF_TORCH: dict[str, list[str]] = json.loads((ROOT / "tests/requirements_of_torch.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
}
PYTHONS, MACHINES = ("3.11", "3.12", "3.13"), ("x86_64", "aarch64")


def asked_for(python: str, machine: str, torch: str) -> Iterator[tuple[str, Requirement]]:
    """All requirements with their askers: the package with its extras, torch, and what is installed."""
    here = {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": machine, "extra": ""}
    extras = itertools.chain.from_iterable(PROJECT["optional-dependencies"].values())
    asked = [("offload", one) for one in (*PROJECT["dependencies"], *extras)]
    asked += [("torch", one) for one in OF_TORCH[torch]]
    for one in distributions():
        name = canonicalize_name(one.metadata["Name"])
        if name in PINNED and name != "torch" and one.version == PINNED[name]:
            asked += [(name, requirement) for requirement in one.requires or ()]
    for asker, text in asked:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(here):
            yield asker, requirement


@pytest.mark.parametrize("torch", OF_TORCH)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_meet_every_requirement(python, machine, torch):
    pinned = {**PINNED, "torch": torch}
    asked = list(asked_for(python, machine, torch))
    unmet = [
        f"{asker} wants {one}, constraints.txt has {version}"
        for asker, one in asked
        if (version := pinned.get(canonicalize_name(one.name)))
        and not one.specifier.contains(version, prereleases=True)
    ]

    assert {"offload", "torch"} <= {asker for asker, _ in asked}
    assert [] == unmet


@pytest.mark.parametrize("torch", OF_TORCH)
def test_nothing_bounds_what_torch_brings_along(torch):
    """A version of triton of our own would leave no build of torch that goes with it."""
    own = {one.name: one for asker, one in asked_for("3.12", "x86_64", torch) if asker == "offload"}
    brought = [Requirement(one).name for one in OF_TORCH[torch] if "Linux" in one]

    assert {"triton", "nvidia-cudnn-cu13"} <= set(brought)
    assert [] == [name for name in brought if name in PINNED or (name in own and own[name].specifier)]


def test_dependencies_have_no_upper_bounds():
    bounds = {name: {part.operator for part in one.specifier} for name, one in DEPENDENCIES.items()}

    assert {} == {name: some for name, some in bounds.items() if not some <= {">=", "!="}}


@pytest.mark.parametrize("torch", [*OF_TORCH, "2.16.0", "3.0.0"])
@pytest.mark.parametrize("transformers", ["5.24.0", "5.25.1", "6.0.0"])
def test_releases_that_are_there_stay(torch, transformers):
    there = {"torch": torch, "transformers": transformers}
    asked = [one for asker, one in asked_for("3.11", "x86_64", "2.13.0") if asker == "offload" and one.name in there]

    assert {"torch", "transformers"} == {one.name for one in asked}
    assert all(one.specifier.contains(there[one.name]) for one in asked)


@pytest.mark.parametrize(("name", "tested"), [("torch", torch_api.TESTED), ("transformers", transformers_api.TESTED)])
def test_the_lowest_release_is_the_lowest_that_is_tested(name, tested):
    assert f">={tested[0]}" == str(DEPENDENCIES[name].specifier)


def test_the_pinned_set_has_the_newest_release_of_transformers_that_is_tested():
    assert PINNED["transformers"].startswith(f"{transformers_api.TESTED[-1]}.")
