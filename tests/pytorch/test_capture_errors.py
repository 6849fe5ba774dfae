"""What a person reads when a step cannot be captured: which op, which line, and what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foretell.errors import InputError
from foretell.pytorch.capture import capture
from foretell.pytorch.capture.step import find
from tests.pytorch import captured as models

ROWS = models.labelled(8, 16)


def refusal(*args, **options):
    with pytest.raises(InputError) as caught:
        capture(*args, **options)
    return str(caught.value)


def on_meta(make):
    """A model without values."""
    with torch.device("meta"):
        return make()


def test_data_that_decides_is_refused_by_op_line_and_way_out():
    text = refusal(on_meta(models.Routed), ROWS, F.cross_entropy)
    assert "aten.nonzero.default" in text
    assert "captured.py:" in text
    assert "share=0.25" in text
    assert "profile" in text


def test_a_share_answers_for_the_data():
    quarter = capture(models.Routed, ROWS, F.cross_entropy, share=0.25)
    half = capture(models.Routed, ROWS, F.cross_entropy, share=0.5)
    expert = "in=16+2x16+16x16+*"
    assert len(quarter.select(kind="kernel", op="addmm", shape=expert)) == 4
    assert not len(half.select(kind="kernel", op="addmm", shape=expert))
    assert any("nonzero" in text for text in quarter.facts["assumed"])


def test_masks_as_indices_are_answered_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 5)

        def forward(self, x):
            return self.head(x[x[:, 0] > 0]).sum() + torch.masked_select(x, x > 0).sum()

    def loss(model, batch):
        return model(batch[0])

    assert "aten.index.Tensor" in refusal(on_meta(Masked), ROWS, loss)
    graph = capture(Masked, ROWS, loss, share=0.5)
    assert len(graph.select(kind="kernel", op="addmm", shape="in=5+4x16+*")) == 1


def test_an_op_without_a_fake_form_is_named():
    library = torch.library.Library("foretell_tests", "DEF")
    library.define("odd(Tensor x) -> Tensor")

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 5)

        def forward(self, x):
            return torch.ops.foretell_tests.odd(self.head(x))

    text = refusal(Odd, ROWS, F.cross_entropy)
    assert "foretell_tests.odd.default" in text
    assert "test_capture_errors.py:" in text
    assert "register_fake" in text


def test_a_mistake_in_the_model_is_reported_with_its_layer():
    text = refusal(nn.Sequential(nn.Linear(16, 8), nn.Linear(9, 5)), ROWS(), F.cross_entropy)
    assert "of layer `1`" in text
    assert "8x16" in text or "[8, 8] X [9, 5]" in text


def test_an_error_of_the_users_own_keeps_its_line_and_its_cause():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("no such thing")

    with pytest.raises(InputError, match=r"test_capture_errors.py:\d+: KeyError") as caught:
        capture(Broken, ROWS, F.cross_entropy)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adan"}, "did you mean `adam`"),
        ({"optimizer": "adam:kind=fussed"}, "did you mean `fused`"),
        ({"optimizer": "adam:betta=3"}, "makes no optimizer"),
        ({"optimizer": lambda p: 3}, "no torch.optim.Optimizer"),
        ({"autocast": "bf61"}, "unknown autocast format"),
        ({"on": "h2000"}, "did you mean `h200`"),
        ({"device": "gpu"}, "unknown device"),
    ],
)
def test_what_is_given_wrong_is_named(options, said):
    given = {"loss": F.cross_entropy, **options}
    assert said in refusal(models.perceptron(16, 5), ROWS, **given)


def test_a_step_has_to_end_in_a_loss():
    text = refusal(models.perceptron(16, 5), lambda: torch.randn(8, 16))
    assert "a tensor of (8, 5), which is no loss" in text


def test_a_model_has_to_be_one():
    assert "no torch.nn.Module" in refusal(lambda: 3, ROWS)


def test_a_target_has_to_be_there():
    text = refusal(models.perceptron(16, 5), lambda: torch.randn(8, 16), F.cross_entropy)
    assert "batch=(x, y)" in text


def test_an_optimizer_of_other_weights_does_not_go_with_a_function():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert "lambda parameters" in refusal(
        models.perceptron(16, 5), ROWS, F.cross_entropy, optimizer
    )


SCRIPT = """
import torch
import torch.nn.functional as F
def model(): return torch.nn.Linear(16, 5)
def batch(batch=8): return torch.randn(batch, 16), torch.randint(0, 5, (batch,))
loss = F.cross_entropy
def optimizer(parameters): return torch.optim.Adam(parameters)
def make(batch=2, wide=16): return torch.nn.Linear(wide, 5), (torch.randn(batch, wide),)
def wrong(): return 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_a_description(script):
    parts = find(script, batch=4)
    assert parts.batch()[0].shape == (4, 16)
    assert parts.loss is F.cross_entropy
    graph = capture(parts.model, parts.batch, parts.loss, parts.optimizer)
    assert graph.facts["optimizer"] == "Adam"
    assert find(f"{script}:model").loss is F.cross_entropy


def test_a_function_answers_the_parts(script):
    parts = find(f"{script}:make:wide=8", batch=3)
    assert parts.model.weight.shape == (5, 8)
    assert parts.model.weight.is_meta  # nothing is allocated
    assert parts.batch[0].shape == (3, 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (":maek", "did you mean `make`"),
        (":wrong", "answered int"),
        (":make:widht=8", "did you mean `wide`"),
    ],
)
def test_a_wrong_name_in_a_script(script, name, said):
    with pytest.raises(InputError, match=said):
        find(script + name)


def test_scripts_that_do_not_load(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        find(str(tmp_path / "none.py"))
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    with pytest.raises(InputError, match="ModuleNotFoundError"):
        find(str(broken))
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(InputError, match=r"`model\(\)` and `batch\(\)`"):
        find(str(empty))
