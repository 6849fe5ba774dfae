"""Captures of the models people write: what is recorded, and under which names."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import foretell
from foretell.cluster import load
from foretell.graph import Kind, Phase, verify
from foretell.pytorch.capture import capture, gpu
from foretell_lab import samples
from tests.pytorch import captured as models


def ops(graph, **wanted):
    return Counter(graph[i].op for i in graph.select(kind="kernel", **wanted).tolist())


def classify(model, batch, **options):
    return capture(model, batch, F.cross_entropy, options.pop("optimizer", "adam"), **options)


MLP = models.perceptron(16, 32, models.CLASSES)
ROWS = models.labelled(8, 16)
EVERY = {
    "perceptron": lambda: classify(MLP, ROWS),
    "convolutional": lambda: classify(models.Convolutional, models.labelled(4, 3, 8, 8)),
    "tied": lambda: capture(models.Tied, models.tokens, optimizer="adamw"),
    "tied bf16": lambda: capture(models.Tied, models.tokens, optimizer="adamw", autocast="bf16"),
    "checkpointed": lambda: classify(models.Checkpointed, ROWS),
    "routed": lambda: classify(models.Routed, ROWS, share=0.25),
    "branching": lambda: classify(lambda: models.Branching(3), ROWS),
    "own gradient": lambda: classify(models.Squared, ROWS),
    "asking": lambda: classify(lambda: models.Asking().cuda().half().float(), ROWS),
    "encoder": lambda: classify(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(), nn.Linear(64, 5)
        ),
        models.labelled(4, 4, 16),
        autocast="bf16",
    ),
    "deep": lambda: classify(
        lambda: nn.Sequential(
            *(nn.Conv3d(2, 4, 3), nn.SiLU(), nn.ConvTranspose3d(4, 2, 3, 2), nn.GroupNorm(1, 2)),
            *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 5)),
        ),
        models.labelled(2, 2, 5, 5, 5),
    ),
    "recurrent": lambda: classify(
        lambda: _Last(nn.GRU(16, 8, batch_first=True), nn.Linear(8, 5)), models.labelled(4, 3, 16)
    ),
}


class _Last(nn.Module):
    def __init__(self, inner, head):
        super().__init__()
        self.inner, self.head = inner, head

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


@pytest.mark.parametrize("name", EVERY)
def test_every_model_is_captured_priced_and_simulated(name):
    graph = EVERY[name]()
    verify(graph)
    phases = {graph[i].phase for i in graph.select(kind="kernel").tolist()}
    assert phases >= {"forward", "loss", "backward", "update"}
    for cluster in ("h200", "v100-16"):
        priced = foretell.price(graph, load(cluster))
        work = np.isin(priced.kind, (Kind.KERNEL, Kind.COPY, Kind.HOST))
        assert (priced.seconds[work] > 0).all()
        assert foretell.simulate(priced).seconds >= priced.seconds[priced.lane == 1].sum()


def test_a_small_step_from_end_to_end():
    graph = classify(MLP, ROWS, optimizer="sgd:kind=loop")
    assert ops(graph, phase="forward") == {"addmm": 2, "clamp_min": 1}
    assert ops(graph, phase="loss") == {"_log_softmax": 1, "nll_loss_forward": 1}
    backward = ops(graph, phase="backward")
    assert backward["mm"] == 3  # the first layer's input wants no gradient
    assert backward["sum"] == 2
    assert ops(graph, phase="update") == {"add_": 4}
    first = graph[int(graph.select(op="addmm", kind="kernel")[0])]
    assert (first.layer, first.dtype, first.flops) == ("0", "fp32", 2 * 8 * 16 * 32)
    assert first.shape.startswith(
        "in=32+8x16+16x32+-+-,types=float+float+float+Scalar+Scalar,args="
    )


@pytest.mark.parametrize("name", ["perceptron", "convolutional", "tied", "branching"])
def test_backward_belongs_to_the_layer_of_its_forward(name):
    """Each layer with weights has, in its backward pass, the gradient of those weights."""
    graph = EVERY[name]()
    forward = {graph[i].layer for i in graph.select(op=("addmm", "convolution", "mm")).tolist()}
    backward = graph.select(phase="backward", op=("mm", "convolution_backward")).tolist()
    assert {graph[i].layer for i in backward} == forward
    for i in graph.select(kind="kernel", phase="backward", name="*.backward").tolist():
        of = graph.select(kind="kernel", name=graph[i].name.removesuffix(".backward")).tolist()
        if of:
            assert graph[i].layer == graph[of[0]].layer
            assert graph[of[0]].phase in ("forward", "loss")


def test_flops_are_those_that_torch_counts():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    x, y = models.labelled(4, 3, 8, 8)()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), y).backward()
    graph = classify(model, (x, y))
    products = graph.select(kind="kernel", op=("addmm", "mm", "convolution*"))
    big = [i for i in products.tolist() if "part=bias" not in graph[i].shape]
    assert graph.flops[big].sum() == pytest.approx(counter.get_total_flops())


def test_a_kernel_waits_for_what_it_uses():
    graph = classify(MLP, ROWS, optimizer=None)
    first, relu, second = graph.select(kind="kernel", phase="forward").tolist()
    assert first in graph[relu].after
    assert relu in graph[second].after
    assert first not in graph[second].after
    wgrad = graph.select(kind="kernel", name="addmm.1.backward", op="mm").tolist()
    assert any(relu in graph[i].after for i in wgrad)


def test_in_place_work_is_what_comes_after_waits_for():
    graph = classify(models.Convolutional, models.labelled(4, 3, 8, 8), optimizer=None)
    added = int(graph.select(kind="kernel", op="add_", bytes=3 * 4 * 8 * 64 * 4)[0])
    pooled = int(graph.select(kind="kernel", op="max_pool2d_with_indices")[0])
    assert added in graph[pooled].after


def test_a_norm_over_turned_dims_answers_in_order():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, models.CLASSES)

        def forward(self, x):
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2)).mean(1)

    for on in ("h200", "cpu"):
        graph = capture(Turned, models.labelled(4, 8, 6), F.cross_entropy, "sgd", on=on)
        names = [graph.text_of("op", int(i)) for i in graph.select(kind="kernel", phase="forward")]
        k = names.index("native_batch_norm")
        copies = {"clone", "copy_"}
        assert copies & set(names[:k]), names
        assert copies & set(names[k:]), names  # the layer behind it finds its input turned


def test_tied_weights_are_one():
    graph = EVERY["tied"]()
    assert graph.facts["parameters"] == 96 * 32 + 32 * 96 + 96 + 2 * 32
    names = [graph.names[int(n)] for n in graph.buffers.name]
    assert names.count("embed.weight") == 2  # the weight and its gradient
    assert "head.weight" not in names


def test_autocast_casts_as_on_a_gpu():
    graph = EVERY["tied bf16"]()
    formats = {(t.op, t.dtype) for t in graph if t.kind == "kernel" and t.phase == "forward"}
    assert ("addmm", "bf16") in formats
    assert ("_cudnn_attention_forward", "bf16") in formats
    assert ("native_layer_norm", "fp32") in formats  # a CPU's autocast would leave it in bf16
    casts = graph.select(phase="forward", kind="kernel", op="copy_", layer="head")
    assert len(casts) == 2  # the tied weight and what it is multiplied by


@pytest.mark.parametrize(
    ("on", "autocast", "found"),
    [
        ("h200", "bf16", "_cudnn_attention_forward"),
        ("a100-80", "bf16", "_flash_attention_forward"),
        ("h200", "", "_efficient_attention_forward"),
    ],
)
def test_attention_runs_on_the_backend_of_the_device(on, autocast, found):
    graph = capture(models.Tied, models.tokens, on=on, autocast=autocast)
    assert ops(graph)[found] == 1
    assert ops(graph)[found.replace("forward", "backward")] == 1


def test_what_is_computed_again_keeps_its_layer():
    plain = classify(lambda: models.Checkpointed(is_on=False), ROWS)
    again = classify(models.Checkpointed, ROWS)
    # Computed again up to the last of what was saved, which is the input of the second gelu.
    assert ops(again)["gelu"] == ops(plain)["gelu"] + 1
    assert ops(again)["addmm"] == ops(plain)["addmm"] + 2
    late = again.select(kind="kernel", phase="backward", op="addmm").tolist()
    assert {again[i].layer for i in late} == {"block.0", "block.2"}
    assert again.facts["peak_bytes"] <= plain.facts["peak_bytes"]


def test_the_kinds_of_optimizer():
    update = {
        kind: ops(classify(MLP, ROWS, optimizer=f"adam:kind={kind}"), phase="update")
        for kind in ("loop", "foreach", "fused")
    }
    assert update["loop"]["addcdiv_"] == 4
    assert update["foreach"]["_foreach_addcdiv_"] == 1
    assert update["fused"] == {"_fused_adam_": 1, "_foreach_add_": 1}  # and the step counts


def test_an_optimizer_is_as_on_a_gpu_unless_said_otherwise():
    graph = classify(MLP, ROWS, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert all(op.startswith("_foreach") for op in ops(graph, phase="update"))


def test_tf32_is_a_format_of_products_and_convolutions():
    for tf32, word in ((True, "tf32"), (False, "fp32")):
        graph = classify(models.Convolutional, models.labelled(4, 3, 8, 8), tf32=tf32)
        assert {graph[i].dtype for i in graph.select(kind="kernel", op="addmm").tolist()} == {word}
        convolutions = graph.select(kind="kernel", op="convolution").tolist()
        parts = {graph[i].shape.rpartition("part=")[2]: graph[i].dtype for i in convolutions}
        assert parts == {"conv": word, "bias": "fp32"}


def test_a_model_that_is_given_stays_as_it_is():
    torch.manual_seed(0)
    model, batch = MLP(), ROWS()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = capture(model, batch, nn.CrossEntropyLoss(), optimizer)
    assert ops(graph, phase="update")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model[0].weight.grad is None
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_nothing_of_the_pretended_gpu_stays():
    before = (list(gpu._guards()), torch.cuda.is_available(), F.linear, nn.Module._apply)
    classify(MLP, ROWS)
    after = (list(gpu._guards()), torch.cuda.is_available(), F.linear, nn.Module._apply)
    assert after == before


def test_the_same_step_is_the_same_graph():
    once, again = EVERY["convolutional"](), EVERY["convolutional"]()
    assert once.fingerprint() == again.fingerprint()


def test_on_a_cpu_the_step_has_the_same_products():
    there = capture(models.Tied, models.tokens, optimizer="adam", device="cpu", tf32=False)
    here = capture(models.Tied, models.tokens, optimizer="adam", tf32=False)
    for op in ("mm", "addmm", "embedding", "_efficient_attention_forward"):
        assert ops(there)[op] == ops(here)[op]


def test_a_number_asked_for_makes_the_host_wait():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 5)

        def forward(self, x):
            out = self.head(x)
            return out * 2 if out.mean().item() > 0 else out

    graph = classify(Loud, ROWS, share=0.5)
    (sync,) = graph.select(kind="sync").tolist()
    assert graph[sync].op == "cudaStreamSynchronize"
    assert graph.drained.task.tolist() == [sync]
    assert graph.facts["assumed"] == ["aten::_local_scalar_dense in the model"]


@pytest.mark.parametrize(
    ("kind", "options", "numbers"),
    [
        ("LSTM", {}, 4 * 8 * (16 + 8)),
        ("LSTM", {"proj_size": 4}, 4 * 8 * (16 + 4) + 4 * 8),
        ("GRU", {"bidirectional": True}, 2 * 3 * 8 * (16 + 8)),
        ("RNN", {"num_layers": 2}, 8 * (16 + 8) + 8 * (8 + 8)),
    ],
)
def test_recurrent_layers_are_one_call_of_cudnn(kind, options, numbers):
    wide = options.get("proj_size", 8) * (2 if options.get("bidirectional") else 1)
    layer = getattr(nn, kind)(16, 8, batch_first=True, **options)
    graph = classify(lambda: _Last(layer, nn.Linear(wide, 5)), models.labelled(4, 3, 16))
    (forward,) = graph.select(kind="kernel", op="_cudnn_rnn").tolist()
    (backward,) = graph.select(kind="kernel", op="_cudnn_rnn_backward").tolist()
    assert graph[forward].flops == 2 * 4 * 3 * numbers
    assert graph[backward].flops == 2 * graph[forward].flops
    assert graph[backward].layer == graph[forward].layer == "inner"


def test_what_comes_from_the_host_goes_over_its_bus():
    graph = EVERY["asking"]()
    assert not len(graph.select(kind="copy"))  # made on the device

    class Fetching(models.Asking):
        def forward(self, x):
            return self.head(x + torch.arange(16).to(x.device))

    (copy,) = classify(Fetching, ROWS).select(kind="copy").tolist()
    assert classify(Fetching, ROWS)[copy].bytes == 16 * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "gflops"),
    [
        ("resnet50", 25_557_032, 4.09 * 2 * 3),  # torchvision's counts, multiplied and added
        ("vgg16", 138_357_544, 15.47 * 2 * 3),
        ("mobilenet_v3_large", 5_483_032, 0.217 * 2 * 3),
        ("swin_t", 28_288_354, 4.49 * 2 * 3),
    ],
)
def test_samples_have_their_published_sizes(name, parameters, gflops):
    sample = getattr(samples, name)(batch=2)
    graph = capture(*sample)
    assert graph.facts["parameters"] == parameters
    work = graph.flops[np.isin(graph.phase, (Phase.FORWARD, Phase.BACKWARD))].sum()
    assert work / 2e9 == pytest.approx(gflops, rel=0.06)


@pytest.mark.slow
def test_language_samples_have_their_published_sizes():
    assert capture(*samples.gpt2(batch=1, length=16)).facts["parameters"] == 124_439_808
    assert capture(*samples.bert(batch=1, length=16)).facts["parameters"] == 109_514_298


@pytest.mark.slow
def test_seventy_billion_parameters_in_a_minute_and_two_gigabytes():
    import resource
    import time

    began = time.process_time()
    graph = capture(*samples.llama(size="70b"))
    assert graph.facts["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * 2**30
