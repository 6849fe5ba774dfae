"""Every operator of the bench can be made ready, runs, and computes what its name says."""

import warnings
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="measuring operators needs torch")

from foretell.errors import InputError  # noqa: E402
from foretell_lab.bench.call import Place  # noqa: E402
from foretell_lab.bench.case import Case, case, held, work  # noqa: E402
from foretell_lab.bench.ops import build, cases, family_of  # noqa: E402
from foretell_lab.bench.words import ATEN  # noqa: E402

CPU = Place(torch.device("cpu"))
ON_GPUS_ONLY = ("flash", "efficient", "cudnn")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of CPU paths nobody trains with
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def everything() -> list[Case]:
    return list(cases())


def test_the_list_is_long_varied_and_has_no_case_twice(everything: list[Case]) -> None:
    assert len(everything) == len(set(everything)) > 15_000
    families = {family_of(c.op) for c in everything}
    assert len(families) == 11
    dtypes = {c.dtype for c in everything if c.op == "conv2d"}
    assert dtypes == {"fp32", "tf32", "bf16", "fp16"}
    assert {c.layout for c in everything if c.op == "conv2d"} == {"nchw", "nhwc"}
    assert {c.direction for c in everything if c.op == "linear"} == {"forward", "dgrad", "wgrad"}


def test_every_case_has_work_and_a_place_in_torch(everything: list[Case]) -> None:
    for c in everything:
        assert held(c) > 0 or c.layout == "none", c
        assert work(c).flops >= 0
        named = f"{c.op} {c.direction}" in ATEN
        assert named or c.direction in ("step", "backward"), c


def test_the_smallest_case_of_every_kind_runs(everything: list[Case]) -> None:
    smallest: dict[tuple[str, str, str, str], Case] = {}
    for c in sorted(everything, key=lambda c: work(c).bytes + work(c).flops / 100):
        smallest.setdefault((c.op, c.direction, c.dtype, c.layout), c)
    ran = 0
    for c in smallest.values():
        if held(c) > 6e7 or work(c).flops > 3e8 or c.layout in ON_GPUS_ONLY or c.dtype == "fp16":
            continue  # tf32 is fp32 here, fp16 is slow
        build(c, CPU).run()
        ran += 1
    assert ran > 200


def test_linear_parts_are_the_gradients_of_the_whole() -> None:
    for layout in ("nk", "kn"):
        got = {}
        for part in ("forward", "dgrad", "wgrad"):
            torch.manual_seed(1)
            got[part] = build(case("linear", part, "fp32", layout, m=5, n=3, k=4), CPU).run()
        assert got["forward"].shape == (5, 3)
        assert got["dgrad"].shape == (5, 4)
        assert got["wgrad"].shape == ((3, 4) if layout == "nk" else (4, 3))


def test_conv_gradients_are_those_of_autograd() -> None:
    sizes = {"n": 2, "c": 4, "k": 6, "r": 3, "s": 3, "stride": 2, "groups": 2, "h": 9, "w": 9}
    for layout in ("nchw", "nhwc"):
        torch.manual_seed(3)
        call = build(case("conv2d", "dgrad", "fp32", layout, **sizes), CPU)
        dgrad = call.run()[0]
        torch.manual_seed(3)
        x = CPU.image(2, 4, 9, 9, dtype="fp32", layout=layout, grad=True)
        weight = CPU.image(6, 2, 3, 3, dtype="fp32", layout=layout)
        out = torch.nn.functional.conv2d(x, weight, None, 2, 1, 1, 2)
        (wanted,) = torch.autograd.grad(out, x, call.fresh[0])
        torch.testing.assert_close(dgrad, wanted)


def test_bmm_layouts_agree_on_the_shape() -> None:
    for layout in ("nn", "nt", "tn"):
        out = build(case("bmm", "forward", "fp32", layout, b=2, m=3, n=5, k=4), CPU).run()
        assert out.shape == (2, 3, 5)


def test_channels_last_is_channels_last() -> None:
    made = CPU.image(2, 8, 5, 5, dtype="fp32", layout="nhwc")
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert not CPU.image(2, 8, 5, 5, dtype="fp32", layout="nchw").is_contiguous(
        memory_format=torch.channels_last
    )


def test_backward_names_what_is_fresh_and_uses_the_engine() -> None:
    call = build(case("gelu", "backward", "fp32", "-", n=64), CPU)
    assert call.uses_engine
    assert len(call.fresh) == 1
    assert not build(case("gelu", "forward", "fp32", "-", n=64), CPU).uses_engine


def test_optimizer_lists_have_the_size_they_say() -> None:
    from foretell_lab.bench.ops.update import tensor_sizes

    for count, total in ((10, 2_000_000), (161, 25_600_000)):
        sizes = tensor_sizes(count, total)
        assert len(sizes) == count
        assert sum(sizes) == pytest.approx(total, rel=0.01)
    step = case("adam", "step", "fp32", "foreach", count=4, total=400_000)
    assert build(step, CPU).run() is None


def test_an_unknown_operator_offers_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown operator"):
        build(case("lienar"), CPU)
