"""Models of the transformers library in small configurations, made from their configs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.pytorch.zoo.case import Case

BATCH, LENGTH, VOCAB = 2, 64, 1000
# The words that most decoders have for their sizes, and those of older ones.
WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB}
DECODER = {**WIDE, "intermediate_size": 688, "num_key_value_heads": 4, "pad_token_id": 0}
ENCODER = {**WIDE, "intermediate_size": 1024}
BART = {
    "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
    "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip
IMAGE = {k: v for k, v in ENCODER.items() if k != "vocab_size"} | {"image_size": 64}
SPEECH = {
    **ENCODER, "conv_dim": (64, 64, 64), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
}  # fmt: skip


def words() -> dict[str, Any]:
    ids = torch.randint(2, VOCAB - 10, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_words() -> dict[str, Any]:
    """Sequences of different lengths, padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, LENGTH // 2 :] = 0
    return {**words(), "attention_mask": mask}


def pairs() -> dict[str, Any]:
    return {**words(), "labels": torch.randint(2, VOCAB - 10, (BATCH, LENGTH // 2))}


def classes() -> dict[str, Any]:
    return {"input_ids": words()["input_ids"], "labels": torch.randint(0, 2, (BATCH,))}


def images(side: int = 64, labels: bool = True) -> dict[str, Any]:
    more = {"labels": torch.randint(0, 2, (BATCH,))} if labels else {}
    return {"pixel_values": torch.randn(BATCH, 3, side, side), **more}


def sound() -> dict[str, Any]:
    return {
        "input_values": torch.randn(BATCH, 3200),
        "labels": torch.randint(1, 30, (BATCH, 8)),
    }


def spectra() -> dict[str, Any]:
    return {
        "input_features": torch.randn(BATCH, 80, 128),
        "labels": torch.randint(2, VOCAB - 10, (BATCH, 16)),
    }


def captioned() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(2, VOCAB - 10, (BATCH, 32)),
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "return_loss": True,
    }


def boxes() -> dict[str, Any]:
    one = {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.5 + 0.2}
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": [one, one]}


def patches(names: str = "pixel_values") -> dict[str, Any]:
    return {names: torch.randn(BATCH, 3, 64, 64)}


def series() -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 128, 4), "future_values": torch.randn(BATCH, 16, 4)}


def _made(config: str, model: str, given: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**given))


def _clip() -> Any:
    import transformers

    text = {**ENCODER, "max_position_embeddings": 64, "eos_token_id": VOCAB - 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**IMAGE, "patch_size": 16}, projection_dim=128
    )
    return transformers.CLIPModel(config)


def _detr() -> Any:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        **{k: v for k, v in BART.items() if k not in ("vocab_size", "max_position_embeddings")},
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
        backbone_config=backbone, num_queries=20, num_labels=5,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def _vision_text(kind: str) -> Any:
    import transformers

    vision = {**IMAGE, "patch_size": 16}
    text = {**DECODER}
    config = getattr(transformers, f"{kind}Config")(
        vision_config={"model_type": "clip_vision_model", **vision},
        text_config={"model_type": "llama", **text},
        image_token_index=VOCAB - 1, vision_feature_layer=-1,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def picture_words() -> dict[str, Any]:
    ids = torch.randint(2, VOCAB - 10, (BATCH, LENGTH))
    ids[:, 1:17] = VOCAB - 1
    return {
        "input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip


_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32}
_DEEPSEEK = {
    **DECODER, "num_key_value_heads": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
_GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": VOCAB}
_T5 = {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_layers": 2, "num_heads": 8}
_T5 |= {"vocab_size": VOCAB, "decoder_start_token_id": 0, "pad_token_id": 0}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
_SWIN |= {"window_size": 4}
_CONV = {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 128, 256]}

# name: config, model, options, batch
TABLE: dict[str, tuple[str, str, dict[str, Any], Callable[[], Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, words),
    "llama-padded": ("LlamaConfig", "LlamaForCausalLM", DECODER, masked_words),
    "mistral": ("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 32}, words),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER, words),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"head_dim": 32}, words),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", DECODER | _MOE, words),
    "qwen2-moe": (
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        DECODER | _MOE | {"shared_expert_intermediate_size": 512}, words,
    ),
    "mixtral": (
        "MixtralConfig", "MixtralForCausalLM",
        DECODER | {"num_local_experts": 8, "num_experts_per_tok": 2}, words,
    ),
    "deepseek-v2": (
        "DeepseekV2Config", "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "greedy", "n_group": 1, "topk_group": 1}, words,
    ),
    "deepseek-v3": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "n_group": 2, "topk_group": 1}, words,
    ),
    "olmoe": (
        "OlmoeConfig", "OlmoeForCausalLM",
        DECODER | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}, words,
    ),
    "gpt-oss": (
        "GptOssConfig", "GptOssForCausalLM",
        DECODER | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
                   "intermediate_size": 256}, words,
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", DECODER | {"head_dim": 32}, words),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", DECODER | {"head_dim": 32}, words),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", DECODER | {"head_dim": 32}, words),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER, words),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", DECODER, words),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", DECODER, words),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", DECODER, words),
    "cohere": ("CohereConfig", "CohereForCausalLM", DECODER, words),
    "granite": ("GraniteConfig", "GraniteForCausalLM", DECODER, words),
    "falcon": ("FalconConfig", "FalconForCausalLM", WIDE, words),
    "bloom": ("BloomConfig", "BloomForCausalLM",
              {"hidden_size": 256, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB}, words),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2, words),
    "gpt-neo": ("GPTNeoConfig", "GPTNeoForCausalLM",
                {"hidden_size": 256, "num_layers": 2, "num_heads": 8, "vocab_size": VOCAB,
                 "attention_types": [[["global", "local"], 1]]}, words),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", ENCODER, words),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 16}, words),
    "opt": ("OPTConfig", "OPTForCausalLM",
            WIDE | {"ffn_dim": 1024, "word_embed_proj_dim": 256}, words),
    "mamba": ("MambaConfig", "MambaForCausalLM",
              {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB}, words),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM",
               {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_heads": 8,
                "head_dim": 32, "n_groups": 1, "state_size": 16, "chunk_size": 32}, words),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM",
             {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB,
              "attention_hidden_size": 128}, words),
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER, words),
    "bert-padded": ("BertConfig", "BertForMaskedLM", ENCODER, masked_words),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", ENCODER, classes),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM",
                   {"dim": 256, "n_layers": 2, "n_heads": 8, "hidden_dim": 1024,
                    "vocab_size": VOCAB}, words),
    "electra": ("ElectraConfig", "ElectraForSequenceClassification", ENCODER, classes),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", ENCODER, words),
    "deberta": ("DebertaV2Config", "DebertaV2ForSequenceClassification",
                ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                           "position_buckets": 16}, classes),
    "mpnet": ("MPNetConfig", "MPNetForSequenceClassification", ENCODER, classes),
    "longformer": ("LongformerConfig", "LongformerForSequenceClassification",
                   ENCODER | {"attention_window": 16, "max_position_embeddings": 130}, classes),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM",
                   ENCODER | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
                              "cls_token_id": 1, "sep_token_id": 1, "local_attention": 16}, words),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5, pairs),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5, pairs),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART, pairs),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", BART, pairs),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", BART, pairs),
    "marian": ("MarianConfig", "MarianMTModel", BART | {"pad_token_id": 0,
               "decoder_start_token_id": 0}, pairs),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration",
                BART | {"num_mel_bins": 80, "max_source_positions": 64, "pad_token_id": 0,
                        "max_target_positions": 64, "bos_token_id": 1, "eos_token_id": 1,
                        "decoder_start_token_id": 0}, spectra),
    "speech2text": ("Speech2TextConfig", "Speech2TextForConditionalGeneration",
                    BART | {"input_feat_per_channel": 128, "max_source_positions": 128,
                            "conv_channels": 64, "max_target_positions": 64}, spectra),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH | {"vocab_size": 32}, sound),
    "hubert": ("HubertConfig", "HubertForCTC", SPEECH | {"vocab_size": 32}, sound),
    "wavlm": ("WavLMConfig", "WavLMForCTC", SPEECH | {"vocab_size": 32}, sound),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE | {"patch_size": 16}, images),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE | {"patch_size": 16}, images),
    "beit": ("BeitConfig", "BeitForImageClassification", IMAGE | {"patch_size": 16}, images),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", IMAGE | {"patch_size": 16}, images),
    "vit-mae": ("ViTMAEConfig", "ViTMAEForPreTraining",
                IMAGE | {"patch_size": 16, "decoder_hidden_size": 128,
                         "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
                         "decoder_intermediate_size": 256}, patches),
    "swin": ("SwinConfig", "SwinForImageClassification", _SWIN, images),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", _CONV, images),
    "resnet": ("ResNetConfig", "ResNetForImageClassification",
               {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256],
                "depths": [1, 1, 1, 1]}, images),
    "mobilenet": ("MobileNetV2Config", "MobileNetV2ForImageClassification",
                  {"image_size": 64}, images),
    "segformer": ("SegformerConfig", "SegformerForImageClassification",
                  {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}, images),
    "patchtst": ("PatchTSTConfig", "PatchTSTForPrediction",
                 {"num_input_channels": 4, "context_length": 128, "patch_length": 8,
                  "patch_stride": 8, "prediction_length": 16, "d_model": 64,
                  "num_hidden_layers": 2, "ffn_dim": 128}, series),
}  # fmt: skip

_BUILT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "clip": (_clip, captioned),
    "detr": (_detr, boxes),
    "llava": (partial(_vision_text, "Llava"), picture_words),
}

CASES = [
    *(Case(name, partial(_made, *row[:3]), row[3]) for name, row in TABLE.items()),
    *(Case(name, *row) for name, row in _BUILT.items()),
]
