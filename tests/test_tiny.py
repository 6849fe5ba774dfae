"""The whole path on ten tasks: build, print, parse, edit, simulate, ask why, save, load."""

import foretell
from foretell.simulate import simulate

TEXT = """\
foretell graph 1
fact batch 32
lane 0 = host "main" of rank 0 ordered
lane 1 = compute "stream 7" of rank 0 ordered
lane 2 = comm "nccl" of rank 0 ordered
%0 = load batch on 0 for 0.5
%1 = host launch on 0 for 0.125
%2 = kernel gemm "forward" on 1 for 1.0 after %0 %1:launch phase=forward
%3 = host launch on 0 for 0.125
%4 = kernel gemm "backward 2" on 1 for 1.0 after %3:launch phase=backward
%5 = host launch on 0 for 0.125
%6 = kernel gemm "backward 1" on 1 for 1.0 after %5:launch phase=backward
%7 = collective all_reduce on 2 for 1.5 after %4 comm_bytes=1048576.0 phase=communicate group="0-7"
%8 = kernel adam on 1 for 0.25 after %6 %7 phase=update
%9 = sync cudaDeviceSynchronize on 0 for 0.0 drains 1
buffer 4096.0 activation "x" of rank 0 from %2 to %6
"""


def built() -> foretell.Graph:
    make = foretell.Builder()
    host = make.lane("main", kind="host")
    stream = make.lane("stream 7", kind="compute")
    comm = make.lane("nccl", kind="comm")
    batch = make.task(kind="load", op="batch", lane=host, seconds=0.5)

    def kernel(name: str, phase: str, after=()) -> int:
        launch = make.task(kind="host", op="launch", lane=host, seconds=0.125)
        task = make.task(
            kind="kernel", op="gemm", name=name, lane=stream, seconds=1.0, phase=phase, after=after
        )
        make.wait(task, launch, kind="launch")
        return task

    forward = kernel("forward", "forward", after=[batch])
    second = kernel("backward 2", "backward")
    first = kernel("backward 1", "backward")
    sent = make.task(
        kind="collective", op="all_reduce", lane=comm, seconds=1.5, comm_bytes=2**20,
        group="0-7", phase="communicate", after=[second],
    )  # fmt: skip
    make.task(
        kind="kernel", op="adam", lane=stream, seconds=0.25, phase="update", after=[first, sent]
    )
    make.task(kind="sync", op="cudaDeviceSynchronize", lane=host, drains=[stream])
    make.buffer(4096, born=forward, dies=first, name="x", kind="activation")
    return make.graph(batch=32)


def test_the_whole_path(tmp_path):
    graph = built()
    assert str(graph) == TEXT
    assert foretell.parse(TEXT).fingerprint() == graph.fingerprint()

    before = simulate(graph)
    assert before.seconds == 0.625 + 1 + 1 + 1.5 + 0.25
    assert [graph[i].op for i in before.critical_path()][-3:] == ["gemm", "all_reduce", "adam"]

    with graph.edit("faster:op=gemm") as edit:
        edit.scale(edit.select(op="gemm"), 0.5)
    after = simulate(edit.graph, before=before)
    assert after.seconds == before.seconds - 1
    assert simulate(edit.graph, engine="readable").seconds == after.seconds
    assert after[7].why == "waited for"
    assert graph[after[7].cause].name == "backward 2"

    foretell.save(edit.graph, tmp_path / "step.graph")
    again = foretell.load(tmp_path / "step.graph")
    assert again.fingerprint() == edit.graph.fingerprint()
    assert again.history == ("faster:op=gemm",)
    assert simulate(again).end.tolist() == after.end.tolist()
    both = foretell.replicate(again, 2)
    assert simulate(both).seconds == after.seconds
