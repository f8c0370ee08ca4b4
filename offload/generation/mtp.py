"""The layers with which a checkpoint drafts for its own model (multi-token prediction), on disk like the others.

Always true:
- transformers' `MTPCandidateGenerator` drafts with them, and by its rules: only loading is different
- nothing is read when they are loaded; they are in the model's budget, and use its embedding and head

Sources: transformers' generation/candidate_generator.py (`MTPCandidateGenerator`) and modeling_layers.py (`MtpModel`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from offload.annotations import Pretrained
from offload.budget import handles_in
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.companions import quantization_of
from offload.checkpoints.forms.formats import Form, values_in
from offload.errors import ArgumentError, CheckpointError, OffloadError
from offload.generation.candidates import measured
from offload.models.device_map import places
from offload.models.pretrained import filled_with, waiting
from offload.models.slots import place_tensors, tensor_slots
from offload.prefetch.engine import count_in
from offload.prefetch.value import page_state_of
from offload.tensor.recipes import stored_in

_LAYERS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # by the model that they draft for


def mtp_candidates(model: Pretrained, given: dict[str, Any]) -> Any:
    """Transformers' generator with the checkpoint's drafting layers; `ArgumentError`, `CheckpointError` for none."""
    from offload.transformers_api import MtpCache, MTPCandidateGenerator

    class Candidates(MTPCandidateGenerator):  # type: ignore[misc]
        def __init__(self, layers: Any, settings: Any, processor: Any) -> None:
            self.num_mtp_layers = layers.num_mtp_layers
            last = config.get_text_config().num_hidden_layers  # up to 5.22, states are counted without the embeddings
            self.model_kwargs_overrides = {"output_hidden_states": [last - 1, last]}
            self.device = layers.embed_tokens.weight.device
            self.mtp_model = layers
            self.mtp_cache = MtpCache(config=config.get_mtp_config())
            self.mtp_cache.activate_past_recording()
            self.do_sample = settings.do_sample
            self.logits_processor = processor
            self.is_main_model_prefill = True

        def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            super().update_candidate_strategy(input_ids, scores, num_matches)
            known, drafted = measured(model), scores.shape[1] - 1
            with known.lock:
                known.summary.add(num_matches + 1, drafted, num_matches)

    config: Any = model.config
    if model not in _LAYERS:
        _LAYERS[model] = _loaded(model, getattr(config.get_text_config(), "num_mtp_layers", None) or 0)
    layers = _LAYERS[model]
    layers.tie_with_main_model(model)
    return Candidates(layers, given["generation_config"], given.get("logits_processor"))


def _loaded(model: Pretrained, count: int) -> Any:
    from transformers import __version__

    from offload.transformers_api import MtpModel

    if not hasattr(MtpModel, "get_mtp_weights_regex"):
        raise ArgumentError(
            f"layers to draft with need transformers 5.20 or later, not {__version__}: install it, or leave use_mtp out"
        )
    if not count:
        raise ArgumentError(f"the configuration of {type(model).__name__} has no layers to draft with (num_mtp_layers)")
    source = open_checkpoint(model.loaded_from)
    if source.is_gguf:
        raise CheckpointError(f"{source.path} is a GGUF file: layers to draft with are not taken from one")
    packed = getattr(model, "packed_as", None)
    quantization = quantization_of(model.config) if packed is None else packed.quantization
    values = values_in(source, quantization, model=model)
    if values.form not in (Form.PLAIN, Form.DECODED):
        raise CheckpointError(f"the layers to draft with in {source.path} have a form that can't be loaded from disk")
    is_one = MtpModel.get_mtp_weights_regex(model).search
    own = {name: tensor for name, tensor in waiting(values).items() if is_one(name)}
    with torch.device("meta"):
        layers = MtpModel(model, count)
    layers.embed_tokens = layers.shared_head = layers.rotary_emb = None  # the model's own: nothing to load
    try:
        missing = filled_with(layers, own, layers.get_weight_conversions(model), model.dtype)
    except OffloadError:
        raise
    except Exception as error:  # transformers can raise anything for names and shapes that it does not expect
        raise CheckpointError(f"the layers to draft with in {source.path} do not fit the model: {error}") from error
    if missing:
        raise CheckpointError(f"{source.path} has no layers to draft with: {missing[0]} is missing")
    slots = tensor_slots(layers)
    place_tensors(slots, places((name for slot in slots for name in slot.names), "disk"))
    pools = [pool for handle in stored_in(handles_in([model])) if (pool := page_state_of(handle).pool) is not None]
    if pools:
        handles = handles_in([layers])
        count_in([*handles, *stored_in(handles)], pools[0])
    return layers.eval()
