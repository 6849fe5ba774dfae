"""Chakra traces in and out, and execution traces in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.graph import Builder, Graph
from foretell.simulate import simulate
from foretell.trace import read, wire, write_chakra
from tests.trace.kineto import Kineto, training_step


def small() -> Graph:
    b = Builder()
    host = b.lane("thread 1", kind="host")
    stream = b.lane("stream 7", kind="compute")
    comm = b.lane("comm", kind="comm")
    a = b.task(kind="host", op="mm", name="aten::mm", lane=host, seconds=1e-5, gap=2e-6)
    k = b.task(kind="kernel", op="mm", name="gemm", lane=stream, seconds=1e-4, layer="fc",
               phase="forward")  # fmt: skip
    b.wait(k, a, lag=3e-6, kind="launch")
    c = b.task(kind="collective", op="all_reduce", name="ar", lane=comm, seconds=5e-5, after=[k],
               comm_bytes=4096, group="0-3")  # fmt: skip
    b.task(
        kind="sync", op="cudaDeviceSynchronize", lane=host, seconds=1e-6, drains=[comm], after=[c]
    )
    return b.graph()


def test_what_is_written_reads_back_and_takes_as_long(tmp_path: Path) -> None:
    g = small()
    (path,) = write_chakra(g, tmp_path / "step.et")
    back = read(path).graph
    assert path.name == "step.0.et"
    for column in ("kind", "seconds", "gap", "phase", "comm_bytes"):
        assert back.column(column).tolist() == g.column(column).tolist()
    assert back.texts("op") == g.texts("op")
    assert back.texts("layer") == g.texts("layer")
    assert simulate(back).seconds == pytest.approx(simulate(g).seconds, rel=1e-12)


def test_a_measured_step_survives_the_way_out_and_back(tmp_path: Path) -> None:
    k = Kineto()
    training_step(k)
    g = read(k.write(tmp_path / "t.json")).graph
    (path,) = write_chakra(g, tmp_path / "out")
    back = read(path).graph
    assert simulate(back).start == pytest.approx(simulate(g).start, abs=1e-12)


def test_each_rank_has_a_file_with_what_it_takes_part_in(tmp_path: Path) -> None:
    b = Builder()
    lanes = [b.lane("comm", rank=r, kind="comm") for r in range(2)]
    b.task(kind="collective", op="all_gather", lanes=lanes, seconds=1e-3, comm_bytes=10.0)
    b.task(kind="kernel", op="mm", lane=b.lane("stream", rank=1), rank=1, seconds=1e-3)
    paths = write_chakra(b.graph(), tmp_path / "g")
    assert [read(p).graph.size for p in paths] == [1, 2]
    assert read(tmp_path).graph.size == 3


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    """As PyTorch's converter writes it: control dependencies are parents and may form a circle."""

    def node(number: int, name: str, *parts: bytes) -> bytes:
        head = wire.number_field(1, number) + wire.bytes_field(2, name.encode())
        return wire.framed(head + b"".join(parts))

    def reported(name: str, field: bytes) -> bytes:
        return wire.bytes_field(10, wire.bytes_field(1, name.encode()) + field)

    cpu = reported("is_cpu_op", wire.number_field(27, 1))
    data = wire.framed(wire.bytes_field(1, b"0.0.4"))
    data += node(5, "aten::mul(0)", wire.number_field(3, 4), wire.packed_field(4, [6]),
                 wire.number_field(7, 30), cpu)  # fmt: skip
    data += node(6, "void mul_kernel()", wire.number_field(3, 4), wire.packed_field(4, [5]),
                 wire.packed_field(5, [5, 999]), wire.number_field(7, 50))  # fmt: skip
    data += node(8, "nccl", wire.number_field(3, 7), wire.packed_field(5, [6]),
                 wire.number_field(7, 20), reported("comm_type", wire.number_field(9, 7)),
                 reported("comm_size", wire.number_field(9, 64)))  # fmt: skip
    (tmp_path / "x.et").write_bytes(data)
    g = read(tmp_path / "x.et").graph
    assert g.texts("op") == ["mul", "mul", "reduce_scatter"]
    assert g.comm_bytes.tolist() == [0.0, 0.0, 64.0]
    assert simulate(g).seconds == pytest.approx(100e-6)


def test_the_json_form(tmp_path: Path) -> None:
    nodes = [
        {"Id": 3, "Name": "aten::mm(0)", "NodeType": 4, "runtime": 10, "is_cpu_op": True},
        {"Id": 4, "Name": "gemm", "NodeType": 4, "data_deps": [3], "runtime": 40},
    ]
    (tmp_path / "c.json").write_text(json.dumps({"workload_graph": nodes}))
    assert simulate(read(tmp_path / "c.json").graph).seconds == pytest.approx(50e-6)


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.99])
def test_a_chakra_file_cut_short_is_said_to_be(tmp_path: Path, keep: float) -> None:
    (path,) = write_chakra(small(), tmp_path / "step")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(InputError):
        read(path)


def tensor(number: int, storage: int, device: str = "cuda:0") -> list[Any]:
    return [number, storage, 0, 64, 4, device]


def node(number: int, name: str, parent: int, ins: list[Any], outs: list[Any], **more: Any) -> Any:
    shapes = [[8, 8]] * len(ins)
    return {
        "id": number, "name": name, "parent": parent, "tid": 1, "inputs": ins, "outputs": outs,
        "input_shapes": shapes, "input_types": ["Tensor(float)"] * len(ins), **more,
    }  # fmt: skip


NODES = [
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, [], []),
    node(3, "aten::linear", 2, [tensor(1, 1), tensor(2, 2)], [tensor(5, 5)]),
    node(4, "aten::t", 3, [tensor(2, 2)], [tensor(3, 2)]),
    node(5, "aten::addmm", 3, [tensor(1, 1), tensor(3, 2)], [tensor(5, 5)]),
    node(6, "aten::empty", 5, [], [tensor(4, 4)]),
    node(7, "aten::relu", 2, [tensor(5, 5)], [tensor(6, 6)]),
    node(8, "autograd::engine::evaluate_function: AddmmBackward0", 2, [], [], fw_tid=1),
    node(9, "aten::mm", 8, [tensor(6, 6)], [tensor(7, 7)]),
    node(10, "record_param_comms", 2, [[tensor(7, 7)], 3, "allreduce"], [tensor(7, 7)]),
    node(11, "aten::add", 2, [tensor(8, 8, "cpu")], [tensor(9, 9, "cpu")]),
]


def with_attributes(n: dict[str, Any]) -> dict[str, Any]:
    """The same node as later schemas write it."""
    info = {"values": n["inputs"], "shapes": n["input_shapes"], "types": n["input_types"]}
    attrs = [{"name": k, "type": "uint64", "value": n.get(k, 0)} for k in ("tid", "fw_tid")]
    return {
        "id": n["id"], "name": n["name"], "ctrl_deps": n["parent"], "inputs": info,
        "outputs": {"values": n["outputs"], "shapes": [], "types": []}, "attrs": attrs,
    }  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
def test_execution_traces_of_both_forms(tmp_path: Path, late: bool) -> None:
    nodes = [with_attributes(n) for n in NODES] if late else NODES
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1", "nodes": nodes}))
    trace = read(tmp_path / "et.json")
    g = trace.graph
    assert g.texts("op") == ["addmm", "relu", "mm", "all_reduce", "add"]
    assert [g[i].phase for i in range(5)] == [
        "forward", "forward", "backward", "communicate", "forward",
    ]  # fmt: skip
    assert [g[i].after for i in range(5)] == [(), (0,), (1,), (2,), ()]
    assert g[4].kind == "host"
    assert g[0].shape.startswith("in=8x8+8x8")
    assert not g.seconds.any()
    assert len(trace.start) == 0
    assert "measured" not in g.facts


def test_an_execution_trace_without_work(tmp_path: Path) -> None:
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1", "nodes": NODES[:1]}))
    with pytest.raises(InputError, match="none of them computes"):
        read(tmp_path / "et.json")


def test_numbers_survive_the_wire() -> None:
    for value in (0, 1, 127, 128, 300, 2**40, 2**64 - 1):
        assert wire.numbers(wire.varint(value)) == [value]
    assert wire.signed(2**64 - 3) == -3
    assert [v for _, v in wire.fields(wire.number_field(9, -3))] == [2**64 - 3]
    values = np.linspace(0, 1, 5).tolist()
    ((_, packed),) = wire.fields(wire.doubles_field(1, values))
    assert isinstance(packed, bytes)
    assert wire.doubles(packed) == values


@pytest.mark.parametrize("late", [False, True])
def test_a_communication_record_names_its_ranks(tmp_path: Path, late: bool) -> None:
    said = [[tensor(7, 7)], 3, ["0", "default_pg"], 1, "allreduce", [], [], 2, 4, 2]
    record = node(10, "record_param_comms", 2, said, [tensor(7, 7)])
    nodes = [with_attributes(n) for n in (*NODES[:8], record)] if late else [*NODES[:8], record]
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1", "nodes": nodes}))
    g = read(tmp_path / "et.json").graph
    assert g.texts("group") == ["", "", "", "2+6"]
