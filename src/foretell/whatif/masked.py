"""Attention in a step that is captured, where the model's library then makes its masks.

The transformers library leaves a mask out where no word is masked. It cannot look that up while a
step is captured, and gives attention a mask then (src/transformers/masking_utils.py, release 5):

    causal        the mask takes the place of the flag, and all scores are worked out
    both ways     no kernel takes such a mask (its rows lie on one another in memory), so that
                  attention is written out: matmuls in fp32, and a pass over the scores for each
                  of what lies between them

A trace does not name libraries. This one is recognised by attention on words that has a scale and
no mask: PyTorch's own layers leave the scale to the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.cluster.device import Device
from foretell.cost import kernel as kernels
from foretell.cost.aten_call import read
from foretell.cost.shape import parse, write
from foretell.graph.columns import Array, Dtype, word_of
from foretell.graph.graph import Graph
from foretell.whatif.asked import asked
from foretell.whatif.base import DoesNotApply, Setting
from foretell.whatif.calls import kernels_of
from foretell.whatif.machine import device_of

# Where each operator has its mask (none has no place for one) and its scale.
PLACES: dict[str, tuple[int | None, int]] = {
    "_efficient_attention_forward": (3, 11), "_efficient_attention_backward": (4, 16),
    "_cudnn_attention_forward": (3, 12), "_cudnn_attention_backward": (8, 15),
    "_flash_attention_forward": (None, 10), "_flash_attention_backward": (None, 14),
}  # fmt: skip
WORDS = "embedding"  # how operators on a table of words begin


class Written(NamedTuple):
    """What attention costs written out, with a mask: rates of a device, and what is moved."""

    products: float  # share of the fp32 peak
    score: float  # bytes a score
    dropped: float  # more of them with dropout
    number: float  # bytes a number of the queries
    seconds: float  # for all its kernels to begin and end


STREAM = 0.875  # of the memory's peak that these passes reach
# By bytes of a number and direction: least squares over the 134 `attention … math` rows of
# cost/tables/measured/h200.csv.gz, median error 8 %. Half precision is widened for it.
WRITTEN = {
    (4, 0): Written(0.92, 54, 8, 110, 25e-6),
    (4, 1): Written(0.77, 43, 12, 49, 19e-6),
    (2, 0): Written(0.92, 67, 15, 135, 37e-6),
    (2, 1): Written(0.75, 43, 15, 70, 26e-6),
}


def masked(graph: Graph, setting: Setting) -> Graph:
    """The step with attention as it is captured; the same where nothing tells of that library."""
    found = [call for r in np.unique(graph.rank).tolist() for call in _unmasked(graph, r)]
    device = _known_device(graph, setting) if found else None
    if device is None:
        return graph
    longest = np.array([call[np.argmax(graph.seconds[call])] for call in found])
    now = np.array([graph.seconds[call].sum() for call in found])
    each = np.stack([graph.op[longest], graph.shape[longest], graph.dtype[longest]], axis=1)
    _, firsts, sort = np.unique(each, axis=0, return_index=True, return_inverse=True)
    told = np.array([_with_mask(graph, int(longest[k]), device) for k in firsts])
    times, least = told[sort.reshape(-1)].T
    with graph.edit() as edit:
        edit.set(longest, seconds=np.maximum(now * times, least), source="formula")
        edit.remove(np.setdiff1d(np.concatenate(found), longest))
    return edit.graph


def _known_device(graph: Graph, setting: Setting) -> Device | None:
    try:
        return device_of(graph, setting)
    except DoesNotApply:
        return None


def _unmasked(graph: Graph, rank: int) -> list[Array]:
    """The kernels of each attention on words with a scale and no mask."""
    numbers = [k for k in map(graph.names.number, PLACES) if k >= 0]
    line = kernels_of(graph, rank) if numbers else np.zeros(0, np.int64)
    place = np.flatnonzero(np.isin(graph.op[line], numbers))
    if not len(place) or not _has_words(graph, line):
        return []
    mine = line[place]
    same = (graph.op[mine[1:]] == graph.op[mine[:-1]]) & (np.diff(place) == 1)
    same &= graph.shape[mine[1:]] == graph.shape[mine[:-1]]
    calls = np.split(mine, np.flatnonzero(~same) + 1)
    return [call for call in calls if _is_bare(graph, int(call[0]))]


def _has_words(graph: Graph, line: Array) -> bool:
    return any(graph.names[int(k)].startswith(WORDS) for k in np.unique(graph.op[line]))


def _is_bare(graph: Graph, task: int) -> bool:
    """Whether a call was given a scale and no mask."""
    op = graph.text_of("op", task)
    call = read(op, graph.text_of("shape", task))
    mask, scale = PLACES[op]
    told = scale < len(call.values) and call.values[scale] not in ("", "-")
    return told and (mask is None or not call.dims[mask])


def _with_mask(graph: Graph, task: int, device: Device) -> tuple[float, float]:
    """How many times as long an attention takes with a mask, and the least it then takes."""
    part = asked(graph.text_of("op", task), graph.text_of("shape", task))[0]
    dtype, sizes = word_of(Dtype, graph.dtype[task]), dict(parse(part.shape))
    if not sizes.get("causal"):
        return 1.0, _written_seconds(sizes, 2 if dtype in ("fp16", "bf16") else 4, device)
    shapes = [part.shape, write(sizes | {"causal": 0.0})]
    flagged, whole = kernels.seconds(device, "attention", dtype, shapes).seconds
    return float(whole / flagged), 0.0


def _written_seconds(sizes: dict[str, float], item: int, device: Device) -> float:
    back = sizes.get("direction", 0.0) > 0
    cost = WRITTEN[item, int(back)]
    queries = sizes["b"] * sizes["heads"] * sizes["sq"]
    scores, numbers = queries * sizes["sk"], queries * sizes["d"]
    flops = (8 if back else 4) * scores * sizes["d"]
    each = cost.score + (cost.dropped if sizes.get("dropout") else 0.0)
    moved = each * scores + cost.number * numbers
    products = flops / (cost.products * device.peak("fp32"))
    return products + moved / (STREAM * device.memory_bandwidth) + cost.seconds
