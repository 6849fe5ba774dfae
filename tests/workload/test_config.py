"""Models from Hugging Face configs: shipped ones, files, the local cache, and what is refused."""

import json
from pathlib import Path

import pytest

from foretell.errors import InputError
from foretell.workload import load
from foretell.workload.load import _tables, family, published
from foretell.workload.load import model as config_model

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


@pytest.mark.parametrize("name", published())
def test_shipped_models_have_their_published_parameters(name):
    table = published()[name]
    assert table["source"]
    assert load(name).parameters == pytest.approx(table["parameters"], rel=0.005)


def test_thirty_models_are_shipped():
    assert len(published()) >= 30
    assert load("Llama-3.1-8B").parameters == load("llama-3.1-8b").parameters


@pytest.mark.parametrize("kind", COUNTED)
def test_architectures_count_as_transformers_does(kind):
    one = COUNTED[kind]
    made, _ = config_model(one["config"], {}, kind)
    assert made.workload().parameters == pytest.approx(one["parameters"], rel=0.001)


def test_traits_are_options_of_their_family():
    for name, traits in _tables("architectures").items():
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
        ({**LLAMA, "num_hidden_layers": 0}, "not a number"),
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
        from foretell.cluster import load as cluster
        from foretell.plan import read
        from foretell.predict import predict

        even, uneven = load("moe"), load("moe:imbalance=1.5")
        assert uneven.parameters == even.parameters
        assert uneven.flops() == pytest.approx(even.flops())  # MFU counts the work, not the wait
        plan, on = read("dp=8,ep=8,zero=1,micro_batch=1,global_batch=8"), cluster("h100:gpus=8")
        slow, quick = (predict(plan, model, on).step for model in (uneven, even))
        assert 1.1 * quick < slow < 1.5 * quick


# Layouts such as NVIDIA publishes for Megatron-Bridge: dense and sparse, 4 k to 128 k words.
ROWS = [
    ("llama-3.1-70b:seq=8192", "dgx-h100:nodes=8", "tp=4,sp=yes,pp=4,cp=2,dp=2,vpp=5,gbs=128"),
    ("llama-3.1-405b:seq=8192", "gb200-nvl72:gpus=256", "tp=4,sp=yes,pp=8,cp=2,dp=4,vpp=8,gbs=128"),
    ("deepseek-v3", "dgx-h100:nodes=128", "tp=2,sp=yes,etp=1,pp=8,dp=64,ep=64,vpp=4,gbs=8192"),
    ("qwen3-235b-a22b", "dgx-h100:nodes=32", "tp=2,sp=yes,etp=1,pp=8,dp=16,ep=32,vpp=4,gbs=2048"),
    ("gpt-oss-120b", "dgx-b200:nodes=8", "pp=4,dp=16,ep=8,vpp=3,gbs=1280"),
    ("llama-3.1-8b:seq=131072", "dgx-h100:nodes=4", "tp=4,sp=yes,cp=8,gbs=16"),
]


@pytest.mark.parametrize(("model", "on", "plan"), ROWS)
def test_published_layouts_can_be_said(model, on, plan):
    from foretell.cluster import load as cluster
    from foretell.plan import read
    from foretell.predict import predict

    order = ",schedule=interleaved" if "vpp" in plan else ""
    found = predict(read(f"{plan},mbs=1,zero=1{order}"), load(model), cluster(on))
    assert 0.05 < found.as_json()["utilisation"] < 0.75


class TestExpertTensorParallel:
    def test_experts_over_tensor_ranks_are_whole(self):
        from foretell.plan import Plan
        from foretell.plan.layer_cost import layouts

        up = next(op for op in load("moe").layers[1].works() if op.name == "up")
        split, whole = (
            up.sizes(layouts([Plan.parse(f"{p},micro_batch=1,global_batch=2")]).degrees(), 1.0)
            for p in ("tp=4,sp=yes,dp=2,ep=2", "tp=4,sp=yes,dp=2,ep=8,etp=1")
        )
        assert [float(split[k][0]) for k in ("experts", "out", "tokens")] == [4, 7168, 8192]
        assert [float(whole[k][0]) for k in ("experts", "out", "tokens")] == [1, 28672, 2048]

    def test_what_cannot_be_is_refused(self):
        from foretell.cluster import load as cluster
        from foretell.plan import read
        from foretell.predict import predict

        with pytest.raises(InputError, match="etp=3"):
            read("tp=4,etp=3")
        on, model = cluster("h100:gpus=8"), load("moe:layers=2")
        with pytest.raises(InputError, match="does not divide"):
            predict(read("tp=4,sp=yes,dp=2,ep=8"), model, on)
        with pytest.raises(InputError, match="sequence parallelism"):
            predict(read("tp=4,dp=2,ep=8,etp=1"), model, on)
