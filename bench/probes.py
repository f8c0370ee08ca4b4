"""Inputs for any transformers model.

Always true:
- inputs depend only on the model's configuration: two models with the same one get the same inputs
- tokens are ordinary ones: no image, padding or end tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch

Probe = dict[str, Any]

_LENGTH = 12
_GRID = 4  # patches vertically and horizontally
# Second inputs that some models take besides tokens.
_BESIDE = [
    "pixel_values",
    "input_features",
    "input_values",
    "bbox",
    "visual_feats",
    "audio_codes",
    "pixel_values_videos",
]
_MOST = 100


def probes(model: Any) -> Iterator[Probe]:
    """Inputs to try, most likely first."""
    seen: list[str] = []
    for names in _kits(model):
        if names in seen:
            continue
        seen.append(names)
        choices = [list(_values(name, model)) for name in names]
        alike = zip(*choices, strict=False) if len(choices) > 2 else []
        for values in (*alike, *islice(product(*choices), _MOST)):
            yield dict(zip(names, values, strict=True))


def _kits(model: Any) -> Iterator[list[str]]:
    """Names of arguments to pass together."""
    known = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name if isinstance(model.main_input_name, str) else needed[0]
    decoder = [name for name in ("decoder_input_ids",) if name in known]
    masks = [name for name in ("input_features_mask", "pixel_attention_mask", "padding_mask") if name in known]
    tokens = [name for name in ("input_ids",) if name in known]
    starts = [[main], [main, *decoder], [*tokens], [*tokens, *decoder]]
    starts += [[main, *masks], [main, "target_sizes"] if "target_sizes" in known else [main]]
    starts += [
        [*tokens, other, *more]
        for other in _BESIDE
        if other in known
        for more in ([], decoder, ["visual_pos"], ["is_longer"])
    ]
    starts += [[main, "past_time_features", "past_observed_mask", "future_values", "future_time_features"]]
    starts += [[*tokens, "decoder_input_values", "speaker_embeddings"]]
    starts += [["encoder_hidden_states"], [*tokens, "pixel_values", "pixel_attention_mask", "spatial_shapes"]]
    starts += [[main, "encoder_hidden_states"], [main, "input_ids", *needed]]
    starts += [["states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask"], []]
    for start in starts:
        names = list(dict.fromkeys([*start, *needed]))
        if names and all(name in known for name in names):
            yield names


def tokens(model: Any, length: int) -> torch.Tensor:
    """Ordinary tokens: (2, length)."""
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    size = getattr(text, "vocab_size", None) or _found(model.config, "vocab_size") or 100
    first, span = (10, 90) if size > 110 else (min(3, size - 1), max(size - 4, 1))
    return first + torch.arange(2 * length).mul_(7).remainder_(span).view(2, length)


def _values(name: str, model: Any) -> Iterator[Any]:
    """Possible values for an argument of that name."""
    make = _MAKERS.get(name)
    if make is not None:
        yield from make(model)


def first_value(name: str, model: Any) -> Any:
    """A likely value for an argument of that name; None if none is known."""
    return next(_values(name, model), None)


def _token_ids(model: Any) -> Iterator[torch.Tensor]:
    yield tokens(model, _LENGTH)
    books = _found(model.config, "num_codebooks")
    if books:  # several audio tracks, one below the other or side by side
        yield tokens(model, _LENGTH * books).view(2 * books, _LENGTH)
        yield tokens(model, _LENGTH * books).view(2, _LENGTH, books)
        yield tokens(model, _LENGTH * (books + 1)).view(2, _LENGTH, books + 1)


def _images(model: Any) -> Iterator[torch.Tensor]:
    config = model.config
    channels = _found(config, "num_channels", "in_channels", "in_chans") or 3
    for size in _image_sizes(config):
        yield _noise(2, channels, *size)
        yield _noise(1, _found(config, "num_frames") or 2, channels, *size)
    patch = _sides(config)
    yield _noise(2, _GRID * _GRID, channels * patch * patch)
    yield from _patches(model)


def _patches(model: Any) -> Iterator[torch.Tensor]:
    """Patches in rows, of one or several frames."""
    config, patch = model.config, _sides(model.config)
    channels = _found(config, "in_channels", "num_channels", "in_chans") or 3
    frames = _found(config, "temporal_patch_size", "patch_temporal") or 1
    for count in dict.fromkeys((frames, 1)):
        yield _noise(_GRID * _GRID, channels * count * patch * patch)
    yield _noise(_GRID * _GRID, channels, patch, patch)
    yield _noise(_GRID * _GRID, frames, channels, patch, patch)
    yield _noise(1, channels, 1, _GRID * _GRID * patch, patch)
    yield _noise(1, channels, patch, _GRID * _GRID * patch)


def _hidden(model: Any) -> Iterator[torch.Tensor]:
    """What is passed between two parts of a model: patches, or sound in channels."""
    yield from _patches(model)
    yield _noise(2, 1, 3200)
    yield _noise(2, _found(model.config, "hidden_size") or 64, 5)


def _sounds(model: Any) -> Iterator[torch.Tensor]:
    """Spectrograms, with time last or first."""
    config = model.config
    wanted = ("num_mel_bins", "feature_size", "input_feat_size", "feature_projection_input_dim", "input_dim")
    sizes = [getattr(config, name, None) for name in wanted] + [_found(config, name) for name in wanted] + [80, 128]
    found = dict.fromkeys(size for size in sizes if isinstance(size, int) and size)
    for length in _frames(model):
        for bins in found:
            yield _noise(2, bins, length)
            yield _noise(2, length, bins)
            for frames in (2, 4, _found(config, "num_stacked_frames") or 1):
                yield _noise(2, length, frames * bins)
    for bins in (*found, 64):
        yield _noise(2, 1, 1001, bins)


def _frames(model: Any) -> list[int]:
    """Lengths of spectrograms: what a fixed table requires, eight per token, or what is cut into windows."""
    return [2 * (_found(model.config, "max_source_positions") or 64), 8 * _LENGTH, 200]


def _waves(model: Any) -> Iterator[torch.Tensor]:
    yield _noise(2, 3840)
    yield _noise(2, 1, 3840)
    yield _noise(2, 1, 16000)
    bins, length = _found(model.config, "num_mel_bins"), _found(model.config, "max_length")
    if bins:
        yield _noise(2, length or 64, bins)


def _series(model: Any) -> Iterator[torch.Tensor]:
    config = model.config
    length = _found(config, "context_length") or 64
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = _found(config, "num_input_channels", "input_size") or 1
    yield _noise(2, length + lags)
    yield _noise(2, length, channels)
    yield _noise(2, length + lags, channels)


def _constant(value: Any) -> Callable[[Any], Iterator[Any]]:
    return lambda _: iter([value])


def _states(name: str, whole: bool = False) -> Callable[[Any], Iterator[Any]]:
    """One step per token, with the width that the configuration has under a name."""

    def made(model: Any) -> Iterator[Any]:
        width = _found(model.config, name) or 1
        yield torch.arange(2 * _LENGTH).view(2, _LENGTH) if whole else _noise(2, _LENGTH, width)

    return made


_MAKERS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "input_ids": _token_ids,
    "qformer_input_ids": lambda model: iter([tokens(model, 6)]),
    "decoder_input_ids": lambda model: iter([tokens(model, 5), tokens(model, 20).view(-1, 5)]),
    "task_inputs": lambda model: iter([torch.ones(2, _found(model.config, "task_seq_len") or 77)]),
    "attention_mask": _constant(torch.ones(2, _LENGTH, dtype=torch.long)),
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "hidden_states": _hidden,
    "grid_thw": _constant(torch.tensor([[1, _GRID, _GRID]])),
    "image_grid_thw": _constant(torch.tensor([[1, _GRID, _GRID]])),
    "target_sizes": _constant(torch.tensor([[_GRID, _GRID]], dtype=torch.int32)),
    "spatial_shapes": _constant(torch.tensor([[_GRID, _GRID]] * 2)),
    "pixel_attention_mask": _constant(torch.ones(2, _GRID * _GRID, dtype=torch.long)),
    "pixel_position_ids": _constant(
        torch.cartesian_prod(torch.arange(_GRID), torch.arange(_GRID))[None].repeat(2, 1, 1)
    ),
    "input_features": _sounds,
    "audio_mel": _sounds,
    "audio_mel_mask": lambda _: iter([torch.zeros(2, 128, dtype=torch.bool)]),
    "input_features_mask": lambda model: iter([torch.ones(2, length, dtype=torch.long) for length in _frames(model)]),
    "merge_sizes": _constant(torch.tensor([1])),
    "prompt_pixel_values": _images,
    "prompt_masks": _images,
    "input_values": _waves,
    "audio_values": _waves,
    "is_longer": _constant(torch.zeros(2, 1, dtype=torch.bool)),
    "bbox": lambda _: iter([torch.zeros(2, _LENGTH, 4, dtype=torch.long), torch.zeros(2, _LENGTH, 8)]),
    "visual_feats": lambda model: iter([_noise(2, 5, _found(model.config, "visual_feat_dim") or 128)]),
    "visual_pos": lambda model: iter([_noise(2, 5, _found(model.config, "visual_pos_dim") or 4)]),
    "query_embeds": lambda model: iter([_noise(2, 8, _found(model.config, "hidden_size") or 128)]),
    "inputs": lambda model: iter([tokens(model, _LENGTH), _noise(2, _LENGTH, _found(model.config, "d_model") or 128)]),
    "encoder_hidden_states": lambda model: iter([_noise(2, 5, _found(model.config, "encoder_hidden_size") or 128)]),
    "decoder_input_values": lambda model: iter([_noise(2, 8, _found(model.config, "num_mel_bins") or 80)]),
    "speaker_embeddings": lambda model: iter([_noise(2, _found(model.config, "speaker_embedding_dim") or 512)]),
    "future_values": lambda model: iter([_noise(2, _found(model.config, "prediction_length") or 1)]),
    "future_time_features": lambda model: iter([_noise(2, _found(model.config, "prediction_length") or 1, 1)]),
    "past_values": _series,
    "past_values_padding": _constant(torch.zeros(2, 64, dtype=torch.long)),
    "past_time_features": lambda model: iter([_noise(2, next(_series(model)).shape[1], 1)]),
    "past_observed_mask": lambda model: iter([torch.ones_like(next(_series(model)))]),
    "freq": _constant(torch.zeros(2, 1, dtype=torch.long)),
    "states": _states("state_dim"),
    "actions": _states("act_dim"),
    "rewards": _states(""),
    "returns_to_go": _states(""),
    "timesteps": _states("", whole=True),
    "audio_codes": lambda model: iter([tokens(model, _LENGTH).view(2, 1, _LENGTH)]),
}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _found(config: Any, *names: str) -> Any:
    """The first of these that a configuration, or a nested one, has as a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return value
    for below in getattr(config, "sub_configs", {}):
        sub = getattr(config, below, None)
        value = _found(sub, *names) if hasattr(sub, "to_dict") else None
        if value:
            return value
    return None


def _sides(config: Any) -> int:
    """Height of a patch in pixels."""
    patch = getattr(config, "patch_size", None)
    return patch[-1] if isinstance(patch, (list, tuple)) else patch or _found(config, "patch_size") or 16


def _image_sizes(config: Any) -> Iterator[tuple[int, int]]:
    found = getattr(config, "image_size", None) or _found(config, "image_size", "max_img_size")
    if isinstance(found, (list, tuple)):
        yield (found[0], found[-1])
        yield (found[-1], found[-1])
    elif found:
        yield (found, found)
    for side in (64, 224, 256):
        yield (side, side)
