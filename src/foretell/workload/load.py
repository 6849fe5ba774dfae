"""A workload of a name, a spec, a configuration or a captured step.

Families of models. `FAMILIES` is what `foretell.workload.load` knows by name.

A model from its Hugging Face config.json: standard fields become the options of a family.

    config.json · a folder that has one · meta-llama/Llama-3.1-8B (from the local cache)

Nothing is downloaded. Which fields mean what is the same for all models; what only the code of an
architecture knows (`model_type`) stands in `models/architectures.toml`. Shipped models are tables
of the same fields in `models/published.toml`.

A workload from what a person writes: a built-in model, a captured step, a trace, or a script.

gpt:layers=24,…    llama-3.1-8b:seq=8192    config.json    step.graph    train.py:make
train.py --lr 0.1

Workloads that are not built in: a captured step, a trace, or a script to capture now.

    step.graph · step.json.gz · train.py:make · package.module:make:size=8
    train.py --lr 0.1 · -m package.train --lr 0.1      a script or module with its arguments
    step.graph:batch=32,seq=4096,dtype=bf16        the same step, another batch, length or format

Readers of traces and captures are above this package and imported by name, on first use.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.graph import Graph
from foretell.graph.file import is_graph_file
from foretell.graph.file import load as load_graph
from foretell.io import decode, is_there, read_bytes
from foretell.spec import Spec
from foretell.workload.captured import from_graph
from foretell.workload.workload import BYTES, Exchange, Layer, Op, Workload

# name -> (module of `models`, class in it): loaded on first use, so that one family costs one file.
FAMILIES: dict[str, tuple[str, str]] = {
    "gpt": ("transformer", "Gpt"),
    "llama": ("transformer", "Llama"),
    "moe": ("transformer", "Moe"),
    "decoder": ("transformer", "Decoder"),
    "mamba": ("recurrent", "Mamba"),
    "bert": ("encoders", "Bert"),
    "transformer": ("seq2seq", "Transformer"),
    "t5": ("seq2seq", "T5"),
    "mt5": ("seq2seq", "Mt5"),
    "rnnlm": ("recurrent", "Rnnlm"),
    "vit": ("encoders", "Vit"),
    "flava": ("encoders", "Flava"),
    "swin": ("encoders", "Swin"),
    "resnet": ("convnets", "Resnet"),
    "vgg": ("convnets", "Vgg"),
    "alexnet": ("convnets", "Alexnet"),
    "densenet": ("convnets", "Densenet"),
    "inception_v3": ("convnets", "InceptionV3"),
    "mobilenet_v2": ("convnets", "MobilenetV2"),
    "mobilenet_v3": ("convnets", "MobilenetV3"),
    "efficientnet": ("convnets", "Efficientnet"),
    "retinanet": ("convnets", "Retinanet"),
    "dit": ("diffusion", "Dit"),
    "unet": ("diffusion", "Unet"),
    "cosmoflow": ("convnets", "Cosmoflow"),
    "unet3d": ("convnets", "Unet3d"),
    "dlrm": ("dlrm", "Dlrm"),
}


# What people call a member of a family, and the spec it is; further options are added to it.
NAMED: dict[str, str] = {
    **{f"resnet{n}": f"resnet:depth={n}" for n in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": "resnet:depth=50,groups=32,base=4",
    "resnext101_32x8d": "resnet:depth=101,groups=32,base=8",
    "wide_resnet50_2": "resnet:depth=50,base=128",
    "wide_resnet101_2": "resnet:depth=101,base=128",
    **{f"vgg{n}": f"vgg:depth={n}" for n in (11, 13, 16, 19)},
    **{f"vgg{n}_bn": f"vgg:depth={n},norm=yes" for n in (11, 13, 16, 19)},
    **{f"densenet{n}": f"densenet:depth={n}" for n in (121, 161, 169, 201)},
    "mobilenet_v3_large": "mobilenet_v3",
    "mobilenet_v3_small": "mobilenet_v3:small=yes",
    **{f"efficientnet_b{n}": f"efficientnet:b={n}" for n in range(8)},
    "vit_b_16": "vit",
    "vit_b_32": "vit:patch=32",
    "vit_l_16": "vit:layers=24,hidden=1024,heads=16",
    "vit_l_32": "vit:layers=24,hidden=1024,heads=16,patch=32",
    "swin_t": "swin",
    "swin_s": "swin:blocks=2+2+18+2",
    "swin_b": "swin:width=128,blocks=2+2+18+2,heads=4+8+16+32",
    "bert_base": "bert",
    "bert_large": "bert:layers=24,hidden=1024,heads=16",
    "bert_small": "bert:layers=4,hidden=512,heads=8",
    "gpt2": "gpt:layers=12,hidden=768,heads=12,vocab=50257,positions=1024,tanh=yes",
    "transformer_base": "transformer",
    "transformer_big": "transformer:hidden=1024,heads=16,inner=4096",
    "t5_small": "t5",
    "t5_base": "t5:layers=12,hidden=768,heads=12,inner=3072",
    "t5_large": "t5:layers=24,hidden=1024,heads=16,inner=4096",
    "mt5_small": "mt5",
    "mt5_base": "mt5:layers=12,hidden=768,heads=12,inner=2048",
    "mt5_large": "mt5:layers=24,hidden=1024,heads=16,inner=2816",
    "mt5_xl": "mt5:layers=24,hidden=2048,heads=32,inner=5120",
    "mt5_xxl": "mt5:layers=24,hidden=4096,heads=64,inner=10240",
}


@runtime_checkable
class Family(Protocol):
    """A model family: a spec that makes a workload."""

    def workload(self) -> Workload: ...


def family(name: str) -> type[Spec]:
    """The class of a family; a KeyError where it is unknown."""
    module, kind = FAMILIES[name]
    found: type[Spec] = getattr(import_module(f"foretell.workload.models.{module}"), kind)
    return found


Fields = Mapping[str, Any]

MOST_BYTES = 4 * 2**20  # of a config.json
SEQ = 4096  # words of a sample where a config allows more
# Options of families by the names that Hugging Face's configs and Megatron's arguments have.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads",
               "multi_query_group_num", "num_query_groups", "kv_heads", "n_kv_heads"),
    "depth": ("head_dim", "kv_channels", "d_kv", "attention_head_dim"),
    "inner": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "encoder_ffn_dim",
              "ffn_dim", "ffn", "ffn_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "tied": ("tie_word_embeddings",),
    "window": ("sliding_window",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
                "n_experts"),
    "top": ("num_experts_per_tok", "moe_top_k", "experts_per_token", "moe_router_topk", "moe_k",
            "top_k_experts", "top_k"),
    "expert_inner": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "dense": ("first_k_dense_replace", "moe_layer_start_index"),
    "every": ("decoder_sparse_step", "interleave_moe_layer_step"),
    "mtp": ("num_nextn_predict_layers", "mtp_num_layers"),
    "capacity": ("moe_expert_capacity_factor",),
    "seq": ("seq_length", "sequence_length", "max_seq_len", "seq_len", "context_length"),
    "image": ("image_size",),
    "patch": ("patch_size",),
    "state": ("state_size", "ssm_state_size"),
    "kernel": ("conv_kernel",),
    "rank": ("time_step_rank",),
}  # fmt: skip
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_ACTS = {"silu": "silu", "swiglu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu"}
_NESTED = ("text_config", "llm_config", "language_config")  # of models that also see or hear
_PARTS = ("attn_config", "ffn_config")  # tables of fields that belong to the whole


def renamed(given: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, str]:
    """Options by a family's own names, where standard names were used."""
    own = {other: name for name, others in NAMES.items() for other in others}
    out: dict[str, str] = {}
    for key, value in given.items():
        name = own.get(key, key) if key not in known else key
        if name in out:
            raise InputError(f"`{key}` is `{name}`, which is given twice", hint="keep one of them")
        out[name] = value
    return out


def published() -> dict[str, dict[str, Any]]:
    """The shipped models: fields of their configs, parameters as published, sources."""
    return dict(_tables("published"))


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    text = files("foretell.workload.models").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def found(name: str) -> Path | None:
    """The config.json that a path, a folder or a model id stands for; None where there is none."""
    path = Path(os.path.expanduser(name))
    if not is_there(str(path)):
        return _cached(name) if _is_id(name) else None
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if path.suffix == ".json" and path.is_file() and _is_config(path):
        return path
    return None


def missing(name: str) -> InputError:
    """The error for a model id that is not on this machine."""
    return InputError(
        f"`{name}` is no file here, and no such model is in {_hub()}",
        hint="nothing is downloaded: give its config.json or folder, fetch it with"
        f" `hf download {name} config.json`, or name a shipped model such as llama-3.1-8b",
    )


def _is_id(name: str) -> bool:
    """Whether a name looks like `owner/model`."""
    parts = name.split("/")
    plain = all(p and not p.startswith(".") and ".." not in p for p in parts)
    return len(parts) == 2 and plain and not name.endswith((".py", ".graph", ".json", ".toml"))


def is_id(name: str) -> bool:
    """Whether a name can only be that of a model on a hub."""
    return _is_id(name) and not is_there(name) and not is_there(str(Path(name).parent))


def _hub() -> Path:
    """Where Hugging Face's libraries keep what they downloaded."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache/huggingface")
    return Path(home).expanduser() / "hub"


def _cached(name: str) -> Path | None:
    """The config of a model in the cache: of its main branch, else of the newest snapshot."""
    folder = _hub() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    try:
        if main.is_file():
            here = folder / "snapshots" / main.read_text().strip() / "config.json"
            if here.is_file():
                return here
        every = sorted(folder.glob("snapshots/*/config.json"), key=lambda p: p.stat().st_mtime)
    except (OSError, ValueError):
        return None
    return every[-1] if every else None


def _is_config(path: Path) -> bool:
    """Whether a JSON file is a model's config rather than a trace."""
    if path.name == "config.json" or path.stat().st_size > MOST_BYTES:
        return path.name == "config.json"
    try:
        fields = decode(read_bytes(path, MOST_BYTES), Any, "")
    except InputError:
        return False
    known = {name for names in NAMES.values() for name in names}
    return isinstance(fields, dict) and ("model_type" in fields or len(known & set(fields)) > 1)


def read(path: Path) -> Fields:
    """The fields of a config.json."""
    raw = read_bytes(path, MOST_BYTES, "model's config")
    fields = decode(raw, Any, f"`{path}`", "give a model's config.json")
    if not isinstance(fields, dict):
        raise InputError(f"`{path}` has no fields", hint="give a model's config.json")
    return fields


def model(fields: Fields, given: Mapping[str, str], where: str) -> tuple[Family, tuple[str, ...]]:
    """The model a config describes, with options written behind it; and what to know of it."""
    flat, notes = _flat(fields)
    traits, guessed = _traits(flat)
    notes += guessed
    name = str(traits.pop("family", "decoder"))
    kind = family(name)
    options = _OPTIONS.get(name, _decoder)(_Config(flat, traits, where))
    texts = {k: _text(v) for k, v in options.items()}
    made = kind.of({**texts, **renamed(given, kind.__dataclass_fields__)})
    assert isinstance(made, Family)
    return made, notes


def _flat(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of the language model, parts of it laid beside the rest."""
    notes: tuple[str, ...] = ()
    flat = dict(fields)
    for key in _NESTED:
        if isinstance(inner := fields.get(key), dict):
            flat = {**fields, **inner}
            notes = (
                f"the language model (`{key}`) alone: towers for images or sound are left out",
            )
    for key in _PARTS:
        if isinstance(inner := flat.get(key), dict):
            flat = {**inner, **flat}
    return flat, notes


def _traits(flat: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Traits of an architecture; guessed from its kind of norm where it is unknown."""
    kind = str(flat.get("model_type", ""))
    table = _tables("architectures")
    for name in (kind, f"{kind}_text"):
        if name in table:
            return dict(table[name]), ()
    rms = "rms_norm_eps" in flat or "layer_norm_eps" not in flat
    like = "llama" if rms else "gpt_neox"
    note = f"`{kind or 'a config without model_type'}` is not known: taken as shaped like {like}"
    return dict(table[like]), (note,)


class _Config:
    """Fields of a config by the options they stand for."""

    def __init__(self, fields: Fields, traits: dict[str, Any], where: str) -> None:
        self.fields, self.traits, self.where = fields, traits, where

    def number(self, option: str, otherwise: float | None = None) -> Any:
        """A whole number above zero, by any of the names of an option."""
        for name in NAMES.get(option, (option,)):
            value = self.fields.get(name)
            if value is not None:
                return self._sound(name, value, least=1 if otherwise is None else 0)
        if otherwise is None:
            names = " or ".join(NAMES.get(option, (option,))[:2])
            raise InputError(
                f"`{self.where}` has no {names}", hint="give the config.json of a whole model"
            )
        return self.traits.get(option, otherwise)

    def _sound(self, name: str, value: Any, least: int = 0) -> Any:
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value < 2**40:
            raise InputError(f"`{name}` of `{self.where}` is `{value}`, not a number of things")
        return int(value) if value == int(value) else value

    def flag(self, name: str, otherwise: bool) -> bool:
        """A field that is true or false."""
        value = self.fields.get(name)
        return bool(self.traits.get(name, otherwise)) if value is None else bool(value)

    def tied(self, otherwise: bool = False) -> bool:
        """Whether one matrix serves words and logits."""
        value = self.fields.get("tie_word_embeddings")
        return bool(self.traits.get("tied", otherwise) if value is None else value)

    def longest(self) -> int:
        """The most words a sample may have."""
        for name in _LONGEST:
            if self.fields.get(name):
                return int(self._sound(name, self.fields[name]))
        return SEQ

    def act(self) -> str:
        """The activation, as a class of kernel."""
        for name in ("hidden_activation", "hidden_act", "activation_function", "activation"):
            value = self.fields.get(name)
            if isinstance(value, str):
                return _ACTS.get(value.lower(), "gelu")
        return str(self.traits.get("act", "silu"))


def _decoder(c: _Config) -> dict[str, Any]:
    """Options of a decoder."""
    longest, heads = c.longest(), c.number("heads")
    out: dict[str, Any] = {k: v for k, v in c.traits.items() if k not in _OWN}
    out |= {k: c.number(k) for k in ("layers", "hidden", "heads", "vocab")}
    out |= {"inner": c.number("inner", 0), "groups": _groups(c, heads), "tied": c.tied()}
    out |= {"seq": min(longest, SEQ), "depth": c.number("depth", 0)}
    out["act"] = c.act()
    if (bias := _bias(c)) is not None:
        out["bias"] = bias
    if c.flag("use_qk_norm", False):
        out["qk_norm"] = "head"
    if c.traits.get("family") == "gpt" or "extra_positions" in c.traits:
        out["positions"] = longest + c.traits.get("extra_positions", 0)
    out |= _shape(c) | _windows(c, out["layers"]) | _latent(c) | _experts(c, out)
    return {k: v for k, v in out.items() if v is not None}


_OWN = ("family", "windowed_every", "extra_positions", "act", "tied", "depth", "bias")


def _groups(c: _Config, heads: int) -> int:
    """Heads of keys and values; one where all share them."""
    if c.flag("multi_query", False) and not c.flag("new_decoder_architecture", False):
        return 1
    groups = c.number("groups", 0)
    return 0 if groups == heads else int(groups)


def _shape(c: _Config) -> dict[str, Any]:
    """Halves side by side, and how many norms they have."""
    parallel = c.fields.get("parallel_attn", c.fields.get("use_parallel_residual"))
    if c.flag("new_decoder_architecture", False) and c.number("num_ln_in_parallel_attn", 2) == 2:
        return {"norms": "parallel2"}
    return {"norms": "pre"} if parallel is False else {}


def _bias(c: _Config) -> str | None:
    """Which matmuls have a bias, where the config or its architecture says so."""
    every = [c.fields.get(k) for k in ("use_bias", "bias", "mlp_bias")]
    if any(value is True for value in every):
        return "all"
    for name, kind in (("attention_bias", "attention"), ("add_qkv_bias", "qkv"),
                       ("qkv_bias", "qkv"), ("use_qkv_bias", "qkv")):  # fmt: skip
        if c.fields.get(name) is True:
            usual = str(c.traits.get("bias", kind))
            return usual if usual != "no" else kind
        if c.fields.get(name) is False and c.traits.get("bias") in ("qkv", "attention"):
            return "no"
    if any(value is False for value in every[:2]):
        return "no"
    return c.traits.get("bias")


def _windows(c: _Config, layers: int) -> dict[str, Any]:
    """The window, and how many layers have it."""
    window = c.number("window", 0)
    if not window or c.fields.get("use_sliding_window") is False:
        return {}
    kinds = c.fields.get("layer_types")
    every = c.fields.get("sliding_window_pattern", c.traits.get("windowed_every"))
    if isinstance(kinds, list) and kinds:
        local = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
    elif isinstance(every, int) and every > 1:
        local = layers - layers // every
    else:
        local = layers
    found = {"window": window} if local else {}
    return found | {"windowed": local} if 0 < local < layers else found


def _latent(c: _Config) -> dict[str, Any]:
    """Latent attention."""
    rank = c.number("kv_rank", 0)
    if not rank:
        return {}
    rope, plain = c.number("rope"), c.number("qk_nope_head_dim")
    ranks = {"q_rank": c.number("q_rank", 0), "kv_rank": rank, "groups": 0}
    return ranks | {"depth": plain + rope, "rope": rope, "value": c.number("value")}


def _experts(c: _Config, so_far: Fields) -> dict[str, Any]:
    """Experts, those that every word goes to, and layers without any."""
    many = c.number("experts", 0)
    if many < 2:
        return {}
    inner = c.number("expert_inner", 0) or so_far["inner"]
    beside = c.number("n_shared_experts", 0) or c.number("moe_num_shared_experts", 0)
    shared = c.number("shared", 0) or beside * inner
    out = {"experts": many, "top": c.number("top", 2), "expert_inner": inner, "shared": shared}
    if isinstance(plain := c.fields.get("mlp_only_layers"), list) and plain:
        out["dense"] = len(plain)
    if c.flag("shared_expert", False) or c.fields.get("model_type") == "llama4_text":
        out["shared"] = shared or inner
        out |= {"inner": c.number("intermediate_size_mlp", inner)}
    return out | {"dense": out.get("dense", c.number("dense", 0)), "every": c.number("every", 1),
                  "mtp": c.number("mtp", 0)}  # fmt: skip


def _bert(c: _Config) -> dict[str, Any]:
    """Options of an encoder of words."""
    out = {k: c.number(k) for k in ("layers", "hidden", "heads", "inner", "vocab")}
    return out | {"positions": c.longest(), "seq": min(c.longest(), 512)}


def _t5(c: _Config) -> dict[str, Any]:
    """Options of T5."""
    out = {k: c.number(k) for k in ("layers", "hidden", "heads", "inner", "vocab", "depth")}
    gated = str(c.fields.get("feed_forward_proj", "relu")).startswith("gated")
    gated = gated or c.flag("is_gated_act", False)
    return out | {"gated": gated, "tied": c.tied(otherwise=True)}


def _seq2seq(c: _Config) -> dict[str, Any]:
    """Options of an encoder and a decoder."""
    out = {k: c.number(k) for k in ("layers", "hidden", "heads", "inner", "vocab")}
    out["decoder"] = c.number("decoder_layers", out["layers"])
    out["act"] = c.act() if c.act() != "silu" else "gelu"
    out["ahead"] = c.flag("ahead", False)
    if mels := c.number("num_mel_bins", 0):
        seq, target = c.number("max_source_positions", 1500), c.number("max_target_positions", 448)
        return out | {"frames": mels, "seq": seq, "target": target, "positions": seq,
                      "targets": target}  # fmt: skip
    longest = c.longest()
    places = longest + c.traits.get("extra_positions", 0)
    return out | {"positions": places, "targets": places, "seq": min(longest, 512)}


def _vit(c: _Config) -> dict[str, Any]:
    """Options of an encoder of images."""
    out = {k: c.number(k) for k in ("layers", "hidden", "heads", "inner", "image", "patch")}
    labels = c.fields.get("id2label")
    classes = len(labels) if isinstance(labels, dict) and len(labels) > 2 else 1000
    return out | {"classes": classes, "extra": c.traits.get("extra", 1)}


def _mamba(c: _Config) -> dict[str, Any]:
    """Options of a state-space model."""
    out = {k: c.number(k) for k in ("layers", "hidden", "vocab", "state", "kernel")}
    out["inner"] = c.number("inner", 0) or round(c.number("expand", 2) * out["hidden"])
    if heads := c.fields.get("num_heads") and c.number("heads", 0):
        out |= {"heads": heads, "groups": c.number("n_groups", 1)}
        out |= {"chunk": c.number("chunk_size", 256)}
    elif isinstance(c.fields.get("time_step_rank"), int):
        out["rank"] = c.number("rank")
    return out | {"tied": c.tied(otherwise=True)}


_OPTIONS = {"decoder": _decoder, "gpt": _decoder, "bert": _bert, "t5": _t5,
            "transformer": _seq2seq, "vit": _vit, "mamba": _mamba}  # fmt: skip


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


OPTIONS = ("batch", "seq", "dtype")
_LENGTHS = ("tokens", "queries", "keys")  # dims that are as long as a sample


MOST = 1e12  # numbers along one dimension of an op
MOST_LAYERS = 20_000  # of a model, and experts of a layer
_COUNTED = ("layers", "blocks", "depth", "experts", "stages")


def refuse(text: str, *, scripts: bool, files: bool) -> None:
    """Raise where a text names code or a file and may not."""
    if not files:
        raise InputError(
            f"`{text[:80]}` is no model of the list", hint="name a family: gpt:layers=24,…"
        )
    if not scripts and _is_code(text):
        raise InputError(
            f"`{text[:80]}` names code, and code is never run because a file says so",
            hint="give the script as an argument of the command, or name a captured .graph file",
        )


def opened(text: str) -> Workload:
    """The workload of a file or a script."""
    name, _, rest = text.partition(":")
    path = Path(name)
    if _is_code(text):
        return _captured(text)
    if is_there(name):
        return _changed(_read(str(path), path.stat().st_mtime_ns), spec.options(rest, text), text)
    if is_id(name):
        raise missing(name)
    raise InputError(
        f"there is no file `{name}`",
        hint="name a .graph file, a trace, train.py:make or a model's config.json",
    )


def _is_code(text: str) -> bool:
    """Whether a text names a script, or a function of a module."""
    if has_arguments(text):
        return True
    name, _, rest = text.partition(":")
    is_module = rest and all(part.isidentifier() for part in name.split("."))
    return name.endswith(".py") or bool(is_module and not is_there(name))


@lru_cache(maxsize=16)
def _read(name: str, _: int) -> Workload:
    """The workload of a file as it was at some time."""
    return from_graph(_graph(Path(name)), name)


def _graph(path: Path) -> Graph:
    if path.is_file() and is_graph_file(path):
        return load_graph(path)
    graph: Graph = import_module("foretell.trace").read(path).graph
    return graph


@lru_cache(maxsize=16)
def _captured(text: str) -> Workload:
    """The step of a script, captured now."""
    try:
        capture = import_module("foretell.pytorch.capture").capture
        find = import_module("foretell.pytorch.capture.step").find
    except ModuleNotFoundError as error:
        raise InputError(
            f"`{text}` has to be captured, which needs PyTorch: {error}",
            hint="pip install 'foretell[torch]', or name a .graph file captured elsewhere",
        ) from None
    if is_loop(text):
        return from_graph(_step_of_script(text), text)
    parts: Any = find(text)
    return from_graph(capture(*parts.four, real=parts.real), text)


def is_loop(text: str) -> bool:
    """Whether a text names a training script, which is run as it is, and no function in one."""
    if has_arguments(text):
        return True
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        return False
    return not import_module("foretell.pytorch.intake.request").is_description(path)


def _step_of_script(text: str) -> Graph:
    """The step of an unchanged training script, run on fake tensors until it is recorded."""
    capture = import_module("foretell.pytorch.intake.launch").capture_script
    script = import_module("foretell.pytorch.intake.request").Script(*_script_of(text))
    with TemporaryDirectory(prefix="foretell-") as folder:
        capture(script, Path(folder) / "step.graph")
        return load_graph(Path(folder) / "step.graph")


def _script_of(text: str) -> tuple[str, tuple[str, ...], bool]:
    """A script or module, its arguments, and whether it is a module."""
    if not has_arguments(text):
        return text, (), False
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"`{text[:80]}`: {error}", hint="quote arguments as in a shell") from None
    is_module = words[0] == "-m"
    name, *args = words[is_module:] or [""]
    return name, tuple(args), is_module


def _changed(workload: Workload, options: dict[str, str], text: str) -> Workload:
    """Another batch, length of a sample or number format."""
    for key in options:
        if key not in OPTIONS:
            raise unknown(f"option of `{text.partition(':')[0]}`", key, OPTIONS)
    if "seq" in options:
        workload = resized(workload, int(spec.read(options["seq"], int, "`seq`")))
    if "batch" in options:
        workload = replace(workload, batch=int(spec.read(options["batch"], int, "`batch`")))
    if "dtype" in options:
        if options["dtype"] not in BYTES:
            raise unknown("number format", options["dtype"], BYTES)
        workload = replace(workload, dtype=options["dtype"])
    return replace(workload, name=text)


def resized(workload: Workload, tokens: int) -> Workload:
    """The same model with samples of another length."""
    old = workload.tokens
    if old <= 1 or tokens < 1:
        raise InputError(
            f"`{workload.name}` has no words whose number could be {tokens}",
            hint="`seq` is for models whose layers run over the words of a sample",
        )

    def sized(dims: Any) -> dict[str, float]:
        return {k: float(tokens) if k in _LENGTHS and v == old else v for k, v in dims.items()}

    def piece(one: Op | Exchange) -> Op | Exchange:
        return replace(one, dims=sized(one.dims))

    def layer(one: Layer) -> Layer:
        return replace(one, ops=tuple(map(piece, one.ops)), sizes=sized(one.sizes))

    return replace(workload, layers=tuple(map(layer, workload.layers)), tokens=float(tokens))


def load(text: str, *, scripts: bool = False, files: bool = True) -> Workload:
    """The workload a spec, a file or, where `scripts` allows it, a training script stands for.

    Scripts are code: allow them only for what the user typed, never for what was read from a file.
    """
    name = text.partition(":")[0]
    if has_arguments(text):
        return _sourced(text, scripts=scripts, files=files)
    if not is_built_in(name) and files and (path := found(name)) is not None:
        return _configured(read(path), text, where=str(path))
    if not is_built_in(name) and is_source(name):
        return _sourced(text, scripts=scripts, files=files)
    return _built_in(text)


def _sourced(text: str, *, scripts: bool, files: bool) -> Workload:
    """The workload of a file or, where that is allowed, of a script."""

    refuse(text, scripts=scripts, files=files)
    return _checked(opened(text), text, least=0.0)  # of a recorded step, a sample's share


def names() -> list[str]:
    """Everything that is known by name."""
    return [*FAMILIES, *NAMED, *published()]


def is_built_in(name: str) -> bool:
    """Whether a name is that of a family, of a member of one, or of a shipped model."""
    return name in FAMILIES or _plain(name) in NAMED or name.lower() in published()


def is_source(name: str) -> bool:
    """Whether a name is that of a file, a script or a module rather than a built-in workload."""
    is_module = "." in name and all(part.isidentifier() for part in name.split("."))
    return is_there(name) or "/" in name or name.endswith((".py", ".graph")) or is_module


def has_arguments(text: str) -> bool:
    """Whether a text is a command line: a script or a module with arguments."""
    is_line = text.startswith("-m ") or ".py " in text or ".py' " in text
    return is_line and not is_there(text.partition(":")[0])


@lru_cache(maxsize=256)
def _built_in(text: str) -> Workload:
    name, given = spec.split(text)
    if (known := published().get(name.lower())) is not None:
        return _configured(known, text, where=name)
    options: dict[str, str] = {}
    if _plain(name) in NAMED:
        name, options = spec.split(NAMED[_plain(name)])
    if name not in FAMILIES:
        raise unknown("workload", name, names())
    kind = family(name)
    made = kind.of(options | renamed(given, kind.__dataclass_fields__))
    if not isinstance(made, Family):
        raise InputError(f"`{name}` makes no workload")
    return _checked(_built(made, text), text)


def _plain(name: str) -> str:
    """Names of members as torchvision writes them."""
    return name.lower().replace("-", "_")


def _configured(fields: Fields, text: str, *, where: str) -> Workload:
    """The workload of a config, with the options behind its name."""
    made, notes = model(fields, spec.options(text.partition(":")[2], text), where)
    return replace(_checked(_built(made, text), text), name=text, notes=notes)


def _built(made: Family, text: str) -> Workload:
    """The layers of a model, built one by one; sizes of which none can be made are refused."""
    for name, value in vars(made).items():
        most = MOST_LAYERS if name.endswith(_COUNTED) else MOST
        if isinstance(value, int) and not -MOST <= value <= most:
            raise InputError(f"`{name}` is {value} in `{text[:200]}`", hint=f"{most:g} at most")
    try:
        return made.workload()
    except (ZeroDivisionError, OverflowError):
        raise InputError(f"`{text}` has no such sizes", hint="sizes are 1 or more") from None


def _checked(workload: Workload, text: str, least: float = 1.0) -> Workload:
    for layer in workload.layers:
        wrong = [
            f"{op.name}: {dim} = {size:g}"
            for op in layer.ops
            for dim, size in op.dims.items()
            if not least <= size <= MOST or not size
        ]
        if wrong or layer.times < 1:
            what = wrong[0] if wrong else f"{layer.name} runs {layer.times} times"
            hint = f"sizes are from 1 to {MOST:g}"
            raise InputError(f"`{text[:200]}` has no such sizes ({what})", hint=hint)
    return workload
