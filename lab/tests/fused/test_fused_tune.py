"""Corrections of fused prices: found again where they were put in, kept in a file, and bounded."""

import numpy as np
import pytest

from foretell.cluster.read import devices
from foretell.cost import fused
from foretell.cost.fused import fused_price
from foretell.errors import InputError
from foretell_lab.fused import data as fused_data
from foretell_lab.fused.tuning import fitted, write

H200 = devices()["h200"]


@pytest.fixture(scope="module")
def some():
    measured = fused_data.shipped("h200")
    return measured.regions.take(np.flatnonzero(~measured.regions.is_written)[:4000:40])


def test_a_device_that_is_slower_throughout_is_found(some):
    priced = fused_price(some, H200, learned=False).seconds
    tuning = fitted(some, 1.5 * priced, priced, H200)
    corrected = fused_price(some, H200, learned=False, tuning=tuning).seconds
    assert np.median(np.abs(corrected / (1.5 * priced) - 1)) < 0.05
    assert tuning.readings == len(some)


def test_what_is_right_already_is_left_alone(some):
    priced = fused_price(some, H200, learned=False).seconds
    tuning = fitted(some, priced, priced, H200)
    corrected = fused_price(some, H200, learned=False, tuning=tuning).seconds
    np.testing.assert_allclose(corrected / priced, 1.0)
    assert tuning.sigma == 0


def test_the_spread_is_that_of_readings_the_fit_did_not_see(some):
    priced = fused_price(some, H200, learned=False).seconds
    noise = np.exp(np.random.default_rng(0).normal(0, 0.1, len(some)))
    tuning = fitted(some, priced * noise, priced, H200)
    assert 0.06 < tuning.sigma < 0.15


def test_a_file_says_the_same_again(some, tmp_path):
    priced = fused_price(some, H200, learned=False).seconds
    tuning = fitted(some, 0.8 * priced, priced, H200)
    write(tuning, tmp_path / "fused.toml")
    assert fused.load(tmp_path / "fused.toml") == tuning


def test_the_environment_names_a_file_and_it_counts_for_its_device_alone(
    some, tmp_path, monkeypatch
):
    plain = {
        name: fused_price(some, devices()[name], learned=False).seconds for name in ("h200", "a100")
    }
    tuning = fitted(some, 2 * plain["h200"], plain["h200"], H200)
    write(tuning, tmp_path / "fused.toml")
    monkeypatch.setenv(fused.VARIABLE, str(tmp_path / "fused.toml"))
    found = fused_price(some, H200, learned=False)
    assert np.median(found.seconds / plain["h200"]) > 1.8
    assert np.all(found.sigma == tuning.sigma)
    other = fused_price(some, devices()["a100"], learned=False).seconds
    np.testing.assert_array_equal(other, plain["a100"])


def test_too_few_readings_and_broken_files_are_refused(some, tmp_path):
    few = some.take(np.arange(5))
    with pytest.raises(InputError, match="5 measured regions are too few"):
        fitted(few, np.ones(5), np.ones(5), H200)
    (tmp_path / "broken.toml").write_text('device = "h200"\n')
    with pytest.raises(InputError, match=r"broken\.toml"):
        fused.load(tmp_path / "broken.toml")
