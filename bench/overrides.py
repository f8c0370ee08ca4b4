"""Exceptions from the rules for tiny configurations, by model type.

Always true:
- an entry has configuration values by name; a dot goes into a nested configuration
- they are needed because the full configuration leaves something open, or ties one size to another
"""

from __future__ import annotations

from typing import Any

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "num_hidden_layers": 2}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_TIMES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320, "image_size": 64}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_FLORENCE = {
    "embed_dim": [16, 32, 64, 128],
    "num_heads": [1, 2, 4, 8],
    "num_groups": [1, 2, 4, 8],
    "depths": [1, 1, 1, 1],
    "projection_dim": 128,
}
_HIERA = {"image_size": [128, 128]}
_SAM2 = {
    **{f"vision_config.backbone_config.{name}": value for name, value in _HIERA.items()},
    "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "prompt_encoder_config.image_size": 128,
}
_HYBRID = ["linear_attention", "linear_attention", "hybrid"] * 2 + ["linear_attention"] * 2
_ASSISTED = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def _inside(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()}


OVERRIDES: dict[str, dict[str, Any]] = {
    "align": _inside("vision_config", _EFFICIENT),
    "apertus1p5": {
        "text_config.vocab_size": 512,
        "vision_config.codebook_size": 64,
        "vision_config.base_channels": 32,
        "audio_config.codebook_size": 64,
        "image_token_id": 298,
        "audio_token_id": 299,
        "image_token_offset": 300,
        "audio_token_offset": 364,
    },
    "autoformer": _TIMES,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 320, "num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 300}, "vq_config.base_channels": 32, "vq_config.resolution": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "vision_config.sam_config.global_attn_indexes": [1],
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [1, 0],
        **{f"{name}_model_config.image_size": 64 for name in ("image", "patch", "fov")},
        **{f"{name}_model_config.patch_size": 16 for name in ("image", "patch", "fov")},
    },
    "diffusion_gemma": _inside("text_config", {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}),
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {"vision_config.adapter_in_dim": 128, "audio_config.adapter_input_size": 128},
    "efficientloftr": {"hidden_size": 256},
    "efficientnet": _EFFICIENT,
    "emu3": {"vocabulary_map": {"<image>": 300, "<|extra_200|>": 301}, "vq_config.base_channels": 32},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "florence2": _inside("vision_config", _FLORENCE),
    "fun_asr_nano": {"adaptor_config.intermediate_size": 32},
    "gemma4_assistant": {"text_config": _ASSISTED},
    "gemma4_unified_assistant": {"text_config": {**_ASSISTED, "model_type": "gemma4_unified_text"}},
    "glm5_next": {"text_config.index_kpool": 4},
    "glm5_next_text": {"index_kpool": 4},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 128, "flow_head_config.latent_dim": 32, "latent_dim": 32},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hunyuan_vl": {"text_config.head_dim": 32},
    "hunyuan_vl_text": {"head_dim": 32},
    "hy_v4_vl": {
        "text_config.qk_rope_head_dim": 16,
        "text_config.head_dim": 16,
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]},
    },
    "hy_v4_vl_text": {
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]},
    },
    "informer": _TIMES,
    "inkling_mm_model": {"vision_config.num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {"vq_config.base_channels": 32, "vq_config.channel_multiplier": [1, 1], "vq_config.num_patches": 4},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 16},
    "lw_detr": {"backbone_config.num_hidden_layers": 10},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "ministral": {"head_dim": 32},
    "mistral4": {"qk_nope_head_dim": 16},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config.sliding_windows": [[16, 4], [16, 0]]},
    "muse_spark": {"audio_config.hidden_sizes": [16, 32, 64, 128], "audio_config.depths": [1, 1, 1, 1]},
    "muse_spark_audio": {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
    "nemo_speechlm": {"text_config.n_groups": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [5, 5, 6]}},
    "perceiver": {"d_latents": 128, "d_model": 128, "num_self_attends_per_block": 2},
    "pocket_tts": {"flow_head_config.condition_dim": 128, "flow_head_config.latent_dim": 32, "latent_dim": 32},
    "qwen4_exp": _inside("text_config", _INDEXER),
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [32, 96],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "max_position_embeddings": 32,
    },
    "rf_detr": {"backbone_config.num_hidden_layers": 12},
    "sam2": _SAM2,
    "sam2_hiera_det_model": _HIERA,
    "sam2_video": _SAM2,
    "step3p7": {"text_config.sliding_window": 8},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "time_series_transformer": _TIMES,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 8, "layers_block_type": _HYBRID},
    "zamba2": {"num_hidden_layers": 8, "layers_block_type": _HYBRID},
}
