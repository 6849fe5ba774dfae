"""Captured models as workloads: compared with the built-in ones, and models nobody built in."""

import pytest

from foretell.cluster import load as load_cluster
from foretell.plan import read
from foretell.predict import predict
from foretell.workload import from_graph, load
from foretell_lab.validate.agreement import MODELS, captured, row

torch = pytest.importorskip("torch")

QUICK = ("vgg16", "cosmoflow", "rnnlm", "dlrm", "bert", "mixtral")


def _marks(name):
    return [] if name in QUICK else [pytest.mark.slow]


PAIRS = [pytest.param(name, marks=_marks(name)) for name in MODELS]


@pytest.fixture
def as_torch_starts():
    """TF32 as PyTorch is set when it starts, whatever tests before this one have set."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("as_torch_starts")
def test_agrees_with_the_built_in_model(name):
    ours, known = captured(name), load(MODELS[name][1])
    found = row(name, ours, known)
    assert ours.parameters == known.parameters
    assert ours.batch == known.batch
    assert abs(found.flops) < 0.01
    assert found.worst < 0.05, found.steps


class Encoder(torch.nn.Module):
    """PyTorch's own encoder: packed heads, functional products."""

    def __init__(self, layers: int = 3, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(1000, width)
        self.places = torch.nn.Parameter(torch.zeros(1, 64, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(width, 10)

    def forward(self, ids):
        return self.out(self.encoder(self.words(ids) + self.places).mean(1))


def encoded(batch=16):
    from foretell.pytorch.capture import capture

    data = torch.zeros(batch, 64, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    return capture(Encoder, data, torch.nn.functional.cross_entropy, "adamw")


def test_a_model_of_ones_own():
    found = from_graph(encoded())
    assert found.parameters == sum(p.numel() for p in Encoder().parameters())
    assert (found.batch, found.num_blocks, found.most("tp")) == (16, 3, 4)
    cluster = load_cluster("h200:gpus=4")
    for text in ("tp=4", "dp=2,pp=2,micro_batch=4", "dp=4,zero=3"):
        assert predict(read(text), found, cluster).fits


def test_another_batch_is_the_same_model():
    small, large = from_graph(encoded(4)), from_graph(encoded(16))
    assert small.flops() == pytest.approx(large.flops())
    cluster, plan = load_cluster("h200:gpus=1"), read("dp=1,global_batch=16")
    steps = [predict(plan, w, cluster).step for w in (small, large)]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)


def test_a_script_is_captured_when_it_is_asked_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make(batch=8, width=128):\n"
        "    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))\n"
        "    data = torch.zeros(batch, 32), torch.zeros(batch, 32)\n"
        "    return model, data, nn.functional.mse_loss, 'sgd'\n"
    )
    found = load(f"{script}:make:batch=16,width=256", scripts=True)
    assert found.parameters == 32 * 256 + 256 + 256 * 32 + 32
    assert (found.batch, found.most("tp")) == (16, 256)


def test_windows_of_every_kind():
    from foretell.pytorch.capture import capture

    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2),
        nn.ConvTranspose2d(32, 8, 2, stride=2),
    )
    data = torch.zeros(4, 3, 64, 64), torch.zeros(4, 8, 64, 64)
    graph = capture(model, data, nn.functional.mse_loss, "sgd")
    found = from_graph(graph)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    ops = ("convolution", "convolution_backward")
    products = sum(t.flops for t in graph if t.op in ops and "part=bias" not in t.shape)
    assert 4 * found.flops() == pytest.approx(products)


def test_casts_of_autocast_are_of_pytorch_alone():
    from foretell.pytorch.capture import capture

    data = torch.zeros(16, 64, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy
    found = from_graph(capture(Encoder, data, loss, "adamw", autocast="bf16"))
    assert found.dtype == "bf16"
    assert found.parameters == sum(p.numel() for p in Encoder().parameters())
    block = next(layer for layer in found.layers if layer.is_block)
    casts = [op for op in block.works() if op.when == "eager"]
    assert len(casts) >= 4  # a weight of each linear layer
    assert all(".copy_" in op.name for op in casts)


def test_packed_projections_are_parts_of_one_parameter():
    from foretell.pytorch.capture import capture

    layer = torch.nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    data = torch.zeros(2, 8, 64), torch.zeros(2, 8, 64)

    def loss(model, given):
        return model(*given).sum()

    found = from_graph(capture(layer, data, loss, "sgd"))
    assert found.parameters == sum(p.numel() for p in layer.parameters())


def test_experts_are_sharded():
    found = captured("mixtral")
    assert found.most("ep") == 8
    moved = [op for layer in found.layers for op in layer.ops if getattr(op, "axis", "") == "ep"]
    assert {op.forward for op in moved} == {"all_to_all"}
    assert len(moved) == 2  # of one block, which is repeated: there and back


def test_what_indices_leave_is_known():
    from foretell.cost.aten import read as call
    from foretell.workload.captured.rows import made_by

    shape = "in=2048x27x27+-|351|351,types=float+TensorList,args=-+-"
    assert made_by(call("index", shape)) == (2048, 351)
    cube = "in=1x16x128x128x128+-+-+-+-+-,types=float,args=-+2x2x2+2x2x2+0x0x0+1x1x1+False"
    assert made_by(call("max_pool3d_with_indices", cube)) == (1, 16, 64, 64, 64)
    assert made_by(call("stack", "in=||,types=TensorList,args=-")) == (3,)  # of single numbers
