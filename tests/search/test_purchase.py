"""How many of which GPUs: the cheapest that ends in time, failures counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.api.scaling import buy, token_count
from foretell.cli.main import main
from foretell.errors import ForetellError, InfeasibleError

MODEL = "llama:layers=8,hidden=2048,heads=16"


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text("h100 = 2.5\na100-80 = 1.6\n")
    return path


def test_the_cheapest_offer_that_ends_in_time_is_chosen(prices: Path) -> None:
    calm = buy(MODEL, ["h100", "a100-80"], tokens="100B", gpus="8..32", batch=256, prices=prices)
    assert calm.best == calm.offers[0]
    assert [o.money for o in calm.offers] == sorted(o.money for o in calm.offers)
    least = min(o.days for o in calm.offers)
    haste = buy(MODEL, [], tokens="100B", days=least, gpus="8..32", batch=256, prices=prices)
    assert haste.best.days == least
    with pytest.raises(InfeasibleError):
        buy(MODEL, ["h100"], tokens="100B", days=least / 100, gpus="8..16", batch=256)


def test_more_gpus_fail_more_often(prices: Path) -> None:
    found = buy(MODEL, ["h100"], tokens="10B", gpus="8..64", batch=256, prices=prices).offers
    good = {o.gpus: o.goodput for o in found}
    assert all(0.5 < share < 1 for share in good.values())
    assert good[8] > good[64]


def test_the_command_answers_in_json(prices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = ["plan", MODEL, "--on", "h100+a100-80", "--tokens", "1B", "--gpus", "8,16"]
    main([*query, "--batch", "64", "--prices", str(prices), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["money"] == min(o["money"] for o in found["offers"])
    assert len(found["offers"]) == 4


@pytest.mark.parametrize("text", ["many", "-3B", "1e40", "0"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ForetellError):
        token_count(text)
