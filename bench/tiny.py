"""Tiny versions of transformers configurations, for any architecture.

Always true:
- results are built by the configuration's own class; a nested configuration is made tiny by the same rules
- every kind of layer in the full configuration is kept, with one or two layers each
- widths that must agree are made equal: every hidden size is the same

Exceptions from the rules are in `OVERRIDES`, by model type; "text_config.x" is x in the nested one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.overrides import OVERRIDES

WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY = 128, 4, 32, 192, 320
_BUILT_ANEW = {"transformers_version", "model_type", "architectures", "_name_or_path", "dtype", "id2label", "label2id"}

# The first rule that matches a number's full name gives its maximum; a function maps the old number.
_FEW: list[tuple[str, Any]] = [
    (r"(mlp_|attention_)?bias|.*stride|.*kernel.*|.*dilation.*|.*(reduction|downsampl|upsampl)\w*_(factor|rate)", None),
    (r"num_kv_shared_layers|num_nextn_predict_layers", lambda old: min(old, 1)),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", lambda old: min(old, 1)),
    (
        r"num_hidden_layers|num_layers|n_layers?|depth|layers|(vision|text)_layers|\w*(encoder|decoder|backbone)_?layers",
        2,
    ),
    (r"num_(encoder|decoder|predictor|hidden)\w*_layers|(\w+_)?num_(hidden_)?layers|\w+_depth|num_blocks", 2),
    (r"\w*vocab_size\w*|num_embeddings|vision_vocab_size", VOCABULARY),
    (r"codebook_size|num_codevectors_per_group", 64),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|zero_expert_num", 8),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|num_selected_experts|moe_router_topk", 2),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group", 1),
]
_NARROW: list[tuple[str, Any]] = [
    (r"\w*kv_lora_rank", 32),
    (r"\w*(q|o)_lora_rank", 48),
    (r"\w*qk_rope_head_dim", 16),
    (r"\w*qk_head_dim", 48),
    (r"\w*(head_dim|head_size|dim_head|d_head|d_kv|kv_channels)", HEAD_DIM),
    (r"\w*(key_value_heads|kv_heads|num_kv_heads)\w*", lambda old: min(old, 2)),
    (r"\w*heads|n_heads?|num_attention_heads\w*", HEADS),
    (r"\w*expert\w*intermediate_size|moe_\w*intermediate_size", 64),
    (r"\w*(intermediate|ffn|inner|feed_?forward|mlp_dim|mlp_hidden|d_ff|linear_units)\w*", INNER),
    (r"\w*(hidden_size|hidden_dim|embed_dim|d_model|emb_dim|embedding_size|n_embd)\w*", WIDTH),
    (r"\w*(projection_dim|proj_dim|proj_size|output_dim|out_dim|embedding_dim|latent_dim)", WIDTH),
    (r"\w*(output_size|out_channels|output_channels|input_feat_size|feature_size|codebook_dim)", WIDTH),
    (r"\w*original_max_position_embeddings", 128),
    (r"\w*max_position_embeddings|n_positions|n_ctx|max_seq_len\w*|max_(source|target)_positions", 256),
    (r"sliding_window|local_attention|attention_chunk_size|index_topk", 8),
    (r"rotary_dim", 16),
    (r"state_size|mamba_d_state|ssm_state_size", 16),
    (r"upsample_groups", WIDTH),
    (r"num_filters", 8),
    (r"num_queries|num_query_tokens|resampler_n_latents|num_latents", 16),
]
# Image sizes, if images are cut into large patches.
_PICTURES: list[tuple[str, Any]] = [(r"image_size|img_size|input_size", "patches")]


def tiny_configs(model_type: str, config_class: Any = None) -> Iterator[tuple[str, Any]]:
    """Configurations to try, smallest first, each with how it was made.

    Args:
        model_type: of a configuration.
        config_class: None for the one in transformers' table.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = OVERRIDES.get(model_type, {})
    for how, rules in (
        ("tiny", [*_FEW, *_NARROW, *_PICTURES]),
        ("large images", [*_FEW, *_NARROW]),
        ("few layers", _FEW),
        ("as it is", []),
    ):
        yield how, tiny_config(_full(config_class or CONFIG_MAPPING[model_type], own), rules, own)


def _full(config_class: Any, own: Mapping[str, Any]) -> Any:
    """From its class alone; if that is invalid, with the exceptions for this model type."""
    try:
        return config_class()
    except Exception:  # defaults that the class itself refuses, each with its own error
        return config_class(**{name: value for name, value in own.items() if "." not in name})


def _usual(config: Any) -> dict[str, Any]:
    try:
        return dict(type(config)().to_dict())
    except Exception:  # as above
        return {}


def tiny_config(config: Any, rules: list[tuple[str, Any]], own: Mapping[str, Any]) -> Any:
    """The configuration after applying the rules, and then the exceptions.

    Args:
        own: the exceptions by name, which override the rules.
    """
    values = _changed(config)
    below = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    below = {name: sub for name, sub in below.items() if hasattr(sub, "to_dict")}
    full = {name: value for name, value in config.to_dict().items() if name not in below}
    values.update(_less(_given(config, full), rules))
    values.update(_layers_of_each_kind(full, values))
    values.update({name: value for name, value in own.items() if "." not in name})
    for name, sub in below.items():
        inner = {key.removeprefix(f"{name}."): value for key, value in own.items() if key.startswith(f"{name}.")}
        if name not in own:
            values[name] = tiny_config(sub, rules, inner)
    if rules:
        _tokens_inside(full, values, [values[name] for name in below])
        _rope_of(
            full, values, sections="mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
        )
    return type(config)(**values)


def _changed(config: Any) -> dict[str, Any]:
    """The values in which a configuration differs from its class's default."""
    usual = _usual(config)
    now = config.to_dict()
    subs = set(getattr(config, "sub_configs", {}))
    return {
        name: value
        for name, value in now.items()
        if name not in _BUILT_ANEW | subs and (name not in usual or usual[name] != value)
    }


def _given(config: Any, full: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the configuration does not derive from others."""
    usual = _usual(config)
    fields = getattr(type(config), "__dataclass_fields__", {})
    given = {name for name, field in fields.items() if field.default is not None}
    return {name: value for name, value in full.items() if name in given or usual.get(name) != value}


def _less(full: Mapping[str, Any], rules: list[tuple[str, Any]]) -> dict[str, Any]:
    less: dict[str, Any] = {}
    for name, old in full.items():
        if (
            rules
            and name in ("depths", "num_blocks")
            and isinstance(old, (list, tuple))
            and all(isinstance(one, int) for one in old)
        ):
            less[name] = [min(one, 1) for one in old]
        if isinstance(old, bool) or not isinstance(old, int):
            continue
        most = next((most for pattern, most in rules if re.fullmatch(pattern, name)), None)
        if most == "patches":
            patch = full.get("patch_size")
            most = 4 * patch if isinstance(patch, int) and patch >= 8 else old
        new = most(old) if callable(most) else min(old, most) if most is not None else old
        if "key_value_heads" in name and old == full.get("num_attention_heads", old):
            new = min(old, HEADS) if len(rules) > len(_FEW) else old
        if new != old:
            less[name] = new
    return less


def _layers_of_each_kind(full: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry per layer, and the number of layers: the first of each kind, at least two."""
    count = next((full[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if full.get(name)), None)
    name_of = next((name for name in ("num_hidden_layers", "num_layers", "n_layer") if full.get(name)), "")
    lists = {name: value for name, value in full.items() if isinstance(value, (list, tuple)) and len(value) == count}
    if not lists or name_of not in values:
        return {}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    first = sorted({kinds.index(kind) for kind in kinds})[:6]
    chosen = first if len(first) > 1 else [0, *range(1, min(2, len(kinds)))]
    return {name_of: len(chosen), **{name: [value[at] for at in chosen] for name, value in lists.items()}}


def _tokens_inside(full: Mapping[str, Any], values: dict[str, Any], below: list[Any]) -> None:
    """Special tokens become the last ones of the vocabulary, all distinct; ordinary ones stay."""
    sizes = [values.get("vocab_size", full.get("vocab_size")), *(getattr(sub, "vocab_size", None) for sub in below)]
    most = min([VOCABULARY, *(size for size in sizes if isinstance(size, int) and size > 1)])
    names = [name for name in full if re.search(r"token_(id|index)$|_idx?$|^(pad|bos|eos)_index$", name)]
    known: dict[int, int] = {}

    def inside(token: Any) -> Any:
        if isinstance(token, list):
            return [inside(one) for one in token]
        if not isinstance(token, int) or isinstance(token, bool) or token < most:
            return token
        return known.setdefault(token, max(most - 1 - (token % 97 if most > 200 else 0), 0))

    for name in names:
        old = values.get(name, full[name])
        if old is not None and inside(old) != old:
            values[name] = inside(old)


def _rope_of(full: Mapping[str, Any], values: dict[str, Any], *, sections: bool) -> None:
    """Parameters of rotary embeddings that depend on head sizes, for the new ones."""
    now = {**full, **values}
    rope = now.get("rope_parameters") or now.get("rope_scaling")
    if not isinstance(rope, dict):
        return
    heads = now.get("num_attention_heads") or now.get("num_heads") or HEADS
    width = now.get("head_dim") or (now.get("hidden_size") or WIDTH) // heads
    if sections and not any(isinstance(value, dict) for value in rope.values()):
        rope = {"mrope_section": [1, 1, 1], **rope}
    name = "rope_parameters" if now.get("rope_parameters") else "rope_scaling"
    values[name] = _at_size(rope, int(width * (rope.get("partial_rotary_factor") or 1)) // 2)


def _at_size(rope: Mapping[str, Any], half: int) -> dict[str, Any]:
    """Sections that sum to half a head, and as many factors."""
    new: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            new[name] = _at_size(value, half)
        elif name == "mrope_section" and value:
            part = half // len(value)
            new[name] = [part] * (len(value) - 1) + [half - part * (len(value) - 1)]
        elif name in ("long_factor", "short_factor") and value:
            new[name] = [value[at % len(value)] for at in range(half)]
        elif name == "original_max_position_embeddings" and value:
            new[name] = min(value, 128)
        else:
            new[name] = value
    return new


def config_for(model_class: Any, config: Any) -> Any:
    """The configuration, or the nested one for this class."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((sub for sub in subs if isinstance(sub, wanted)), config)
