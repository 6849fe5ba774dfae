"""What a terminal of 80 columns shows: no line of an answer is wider."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from foretell.cli.main import foretell
from foretell.report.words import fitted

ROOT = Path(__file__).resolve().parents[2]
STEP = "docs/guides/step.txt"
TRACE = "src/foretell/samples/traces/resnet18-h200.json.gz"
MODEL = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1000"
QUERIES = (
    f"show {TRACE}", f"show {STEP}", f"simulate {STEP}", f"replay {TRACE}",
    f"whatif {STEP} faster-host:times=2", f"advise {STEP} faster-host:times=2",
    f"compare {STEP} {STEP}", f"check {STEP} --step-under 1s",
    f"report {STEP} --no-advice", f"predict {MODEL} --on dgx-a100:gpus=8 --plan dp=8",
    f"oracle {MODEL} --on dgx-a100 --gpus 1..8", "schedule v:devices=4 --no-cache", "explain",
    "plan vgg16 --on dgx-a100:gpus=4 --with fusion:seconds=1",
)  # fmt: skip


@pytest.mark.parametrize("line", QUERIES, ids=lambda line: line.partition(" ")[0])
def test_answers_fit_eighty_columns(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(foretell, line.split())
    assert result.exit_code == 0, result.output
    assert len(result.stdout) > 20
    assert [text for text in result.stdout.splitlines() if len(text) > 80] == []
    assert "\x1b" not in result.stdout


def test_long_lines_are_broken_and_short_ones_left():
    text = f"short   as it is\n{'word ' * 40}"
    first, *others = fitted(text).splitlines()
    assert first == "short   as it is"
    assert len(others) > 1
    assert all(len(line) <= 100 for line in others)
