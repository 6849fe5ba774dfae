"""Models from Hugging Face configs: shipped ones, files, the local cache, and what is refused."""

import json
from pathlib import Path

import pytest

from foretell.errors import InputError
from foretell.workload import config, load
from foretell.workload.models import family

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
# Parameters that transformers 5.17 counts in small models of each architecture, on `meta`.
COUNTED = json.loads((Path(__file__).parent / "architectures.json").read_text())


def written(folder: Path, fields: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("name", config.published())
def test_shipped_models_have_their_published_parameters(name):
    table = config.published()[name]
    assert table["source"]
    assert load(name).parameters == pytest.approx(table["parameters"], rel=0.005)


def test_thirty_models_are_shipped():
    assert len(config.published()) >= 30
    assert load("Llama-3.1-8B").parameters == load("llama-3.1-8b").parameters


@pytest.mark.parametrize("kind", COUNTED)
def test_architectures_count_as_transformers_does(kind):
    one = COUNTED[kind]
    made, _ = config.model(one["config"], {}, kind)
    assert made.workload().parameters == pytest.approx(one["parameters"], rel=0.001)


def test_traits_are_options_of_their_family():
    for name, traits in config._tables("architectures").items():
        fields = set(family(str(traits.get("family", "decoder"))).__dataclass_fields__)
        own = {"family", "windowed_every", "extra_positions"}
        assert set(traits) <= fields | own, name


def test_a_config_a_folder_and_the_cache(tmp_path, monkeypatch):
    path = written(tmp_path / "model", LLAMA)
    one = load(f"{path}:seq=8192,batch=4")
    assert (one.tokens, one.batch, one.name) == (8192, 4, f"{path}:seq=8192,batch=4")
    assert one.parameters == load(str(path.parent)).parameters == 8_030_261_248
    hub = tmp_path / "home" / "hub" / "models--meta-llama--Llama-3.1-8B"
    written(hub / "snapshots" / "abc", LLAMA)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert load("meta-llama/Llama-3.1-8B").parameters == one.parameters
    with pytest.raises(InputError, match="no such model") as error:
        load("meta-llama/Llama-9-1B")
    assert "nothing is downloaded" in error.value.hint


def test_standard_names_are_options():
    by_name = load("llama:num_key_value_heads=8,intermediate_size=14336,vocab_size=128256")
    assert by_name.parameters == 8_030_261_248
    assert by_name.fingerprint() == load("llama:groups=8,inner=14336,vocab=128256").fingerprint()
    wide = load("llama:head_dim=256,num_hidden_layers=2")
    assert wide.parameters > load("llama:layers=2").parameters
    with pytest.raises(InputError, match="given twice"):
        load("llama:layers=2,num_hidden_layers=2")


def test_what_is_not_known_is_said(tmp_path):
    fields = {**LLAMA, "model_type": "brand_new", "rms_norm_eps": 1e-5}
    made = load(str(written(tmp_path / "new", fields)))
    assert "not known" in made.notes[0]
    both = {"model_type": "see", "text_config": LLAMA, "vision_config": {}}
    assert "left out" in load(str(written(tmp_path / "both", both))).notes[0]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "has no num_attention_heads"),
        ({**LLAMA, "hidden_size": "wide"}, "not a number"),
        ({**LLAMA, "hidden_size": -1}, "not a number"),
        ({**LLAMA, "num_attention_heads": 30}, "hidden"),
        ({**LLAMA, "num_key_value_heads": 7}, "groups=7"),
        ({**LLAMA, "num_hidden_layers": 0}, "layers=0"),
        ([1, 2], "no fields"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path, fields, match):
    with pytest.raises(InputError, match=match):
        load(str(written(tmp_path, fields)))


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load(str(path))


class TestModelsOfToday:
    def test_latent_attention_is_small_and_its_heads_split(self):
        ops = {op.name: op for op in load("deepseek-v3").layers[1].works()}
        assert ops["keys.down"].dims["out"] == 512 + 64
        assert ops["attention"].dims["depth"] == 192
        assert ops["attention"].dims["value"] == 128
        assert "tp" not in ops["keys.down"].splits
        assert ops["keys"].splits["tp"] == "out"

    def test_first_layers_are_dense_and_more_words_are_predicted(self):
        layers = {layer.name: layer for layer in load("deepseek-v3").layers}
        assert [layers[n].times for n in ("dense", "sparse", "mtp")] == [3, 58, 1]
        assert load("deepseek-v3").num_blocks == 61

    def test_windows_save_work(self):
        seen = "decoder:layers=4,hidden=256,heads=4,seq=4096"
        whole, half, all_ = (load(seen + more).flops() for more in
                             ("", ",window=512,windowed=2", ",window=512"))  # fmt: skip
        assert half == pytest.approx((whole + all_) / 2)
        scores = 4 * 3 * 4 * 256 * 4096 * (4097 / 2 - (512 - 512 * 511 / 8192))
        assert whole - all_ == pytest.approx(scores)

    def test_adapters_leave_weights_alone(self):
        from foretell.cluster import load as cluster
        from foretell.plan import Plan, memory

        plan, on = Plan.parse("dp=1,micro_batch=1,global_batch=1"), cluster("h100:gpus=1")
        frozen, trained = (memory(plan, load(m), on)[0] for m in ("llama:lora=8", "llama"))
        assert float(frozen.optimizers[0]) < 0.01 * float(trained.optimizers[0])
        assert float(frozen.parameters[0]) == pytest.approx(float(trained.parameters[0]), rel=0.01)
        assert load("llama:lora=8").flops() < 0.75 * load("llama").flops()

    def test_the_busiest_rank_sets_the_pace(self):
        even, uneven = load("moe"), load("moe:imbalance=1.5")
        assert uneven.parameters == even.parameters
        assert 1.2 * even.flops() < uneven.flops() < 1.5 * even.flops()
