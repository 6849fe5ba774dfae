"""The reference page: its files are sound and its code runs."""

import re
from pathlib import Path

from foretell.cluster import load, validate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "clusters.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def test_the_file_it_shows_is_sound() -> None:
    whole, tiers, switches = _blocks("toml")
    assert validate(whole) == ()
    nodes = '[[node]]\npreset = "abci-node"\ncount = 5\n'
    assert validate(nodes + tiers) == ()
    assert validate(nodes + switches) == ()


def test_its_code_runs_and_says_the_truth() -> None:
    (code,) = _blocks("python")
    exec(compile(code, "clusters.md", "exec"), {})
    cluster = load("dgx-1-v100:nodes=2")
    assert (cluster.size, cluster.devices[0].peak("fp16")) == (16, 125e12)
    assert cluster.bandwidth(0, 3) == 50e9
    assert cluster.ring(range(8)) == (0, 3, 2, 1, 5, 6, 7, 4)


def test_the_specs_it_shows_load() -> None:
    head = PAGE.read_text(encoding="utf-8").split("## A file")[0]
    specs = re.findall(r"^    (\S+)  ", head, re.M)
    assert len(specs) == 6
    for spec in specs:
        assert spec == "lab.toml" or load(spec).size > 0
