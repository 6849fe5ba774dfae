"""Synchronisations taken away: the host runs ahead, and threads still hand over."""

import pytest

from foretell.graph import Builder
from foretell.simulate import simulate
from foretell.whatif import DoesNotApply, Setting, parse
from tests.whatif.traced import Step, convnet


def test_the_host_no_longer_waits():
    s = Step()
    s.op("mm")
    s.host("cudaStreamSynchronize", 1e-6, name="item", kind="sync", drains=[s.stream], gap=3e-5)
    last = s.host("python", 1e-5)
    step = s.graph()
    assert simulate(step).start[last] > 1e-3  # behind the kernel
    after = parse("remove-sync").apply(step, Setting())
    end = simulate(after)
    (python,) = after.select(op="python")
    assert end.start[python] == pytest.approx(2.5e-5 + 2e-5 + 3e-5)  # gaps stay
    assert not len(after.select(kind="sync"))


def test_one_call_may_be_chosen():
    step = convnet()
    after = parse("remove-sync:call=item").apply(step, Setting())
    assert [after[int(t)].name for t in after.select(kind="sync")] == ["copy_"]
    with pytest.raises(DoesNotApply, match="by `nonzero`"):
        parse("remove-sync:call=nonzero").apply(step, Setting())


def test_a_hand_over_behind_a_synchronisation_stays():
    make = Builder()
    main, other = make.lane("main", kind="host"), make.lane("other", kind="host")
    stream = make.lane("stream", kind="compute")
    launch = make.task(kind="host", op="launch", lane=other, seconds=1.0)
    kernel = make.task(kind="kernel", op="mm", lane=stream, seconds=10.0)
    make.wait(kernel, launch, kind="launch")
    sync = make.task(kind="sync", op="cudaDeviceSynchronize", lane=other, drains=[stream])
    last = make.task(kind="host", op="python", lane=main, seconds=1.0)
    make.wait(last, sync, kind="thread")
    step = make.graph()
    assert simulate(step).start[last] == 11.0
    after = parse("remove-sync").apply(step, Setting())
    assert simulate(after).start[after.select(op="python")[0]] == 1.0


def test_nothing_to_remove():
    s = Step()
    s.op("mm")
    with pytest.raises(DoesNotApply, match="never waits"):
        parse("remove-sync").apply(s.graph(), Setting())
