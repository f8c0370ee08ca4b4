"""torch_to_nnef: its exporter accepts our models in the ways shown on the page."""

import copy
import tarfile

import pytest
import torch
from torch import nn

import offload
from tests.pages import fences
from tests.processes import ROOT

torch_to_nnef = pytest.importorskip("torch_to_nnef", reason="needs torch_to_nnef, which is not installed")
PAGE = ROOT / "tutorials" / "how-to" / "from-torch-to-nnef.md"


class Tied(nn.Module):
    """An embedding tied to the last layer, with a buffer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self.embedding(x))) * self.scale)


MODELS = {
    "layers": (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(2, 4)),
    "tied": (Tied(), torch.arange(6)[None]),
}


def of_page(name):
    names: dict = {}
    for fence in fences(PAGE.read_text(encoding="utf-8")):
        if f"def {name}(" in fence.text:
            exec(fence.text, names)
    return names[name]


def exported(model, x, path):
    target = torch_to_nnef.KhronosNNEF("1.0.5", check_io=False)
    options = {"input_names": ["x"], "output_names": ["y"], "compression_level": 0, "log_level": 40}
    made = torch_to_nnef.export_model_to_nnef(model.eval(), (x,), path, target, **options)
    with tarfile.open(made) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive.getmembers() if one.isfile()}


def values_of(files):
    """The values among the files; torch_to_nnef uses either name for a tied one."""
    names = {"head.weight.dat": "embedding.weight.dat"}
    return {names.get(name, name): data for name, data in files.items() if name.endswith(".dat")}


@pytest.mark.parametrize("prepare", [offload.materialize, lambda model: of_page("hand_over")(model)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_materialized_or_handed_over_is_exported_as_the_plain_one(name, prepare, tmp_path):
    model, x = MODELS[name]
    offloaded = offload.disk_offload(copy.deepcopy(model), offload_buffers=True)
    prepare(offloaded)
    found = exported(offloaded, x, tmp_path / "offloaded.nnef")

    assert values_of(exported(copy.deepcopy(model), x, tmp_path / "plain.nnef")) == values_of(found)


def test_tied_values_that_are_handed_over_stay_tied():
    offloaded = offload.disk_offload(Tied())
    of_page("hand_over")(offloaded)

    assert offloaded.head.weight is offloaded.embedding.weight
    assert not any(offload.is_offloaded(value) for value in offloaded.parameters())
