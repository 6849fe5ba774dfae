"""Images with their channels last: convolutions read them as tensor cores want them.

Every convolution, batch-norm and pooling takes what the measured tables say the layout makes of it;
in half precision that saves the kernels that turned images round before and after each convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.graph.graph import Dtype, Graph, word_of
from foretell.memory import change as memory
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.table_lookup import (
    CONVOLVES,
    LAID_OUT,
    Change,
    format_change,
    image_layout,
    kernel_groups,
    retimed,
)


@dataclass(frozen=True)
class ChannelsLast(WhatIf):
    """Keep images, activations and filters with their channels last."""

    name = "channels-last"
    assumes = (
        "every operator between convolutions keeps the layout; kernels change as they did where "
        "both layouts were measured, on an H200",
    )
    source = "PyTorch documentation, Channels Last Memory Format"
    code = "model.to(memory_format=torch.channels_last)   # and the images"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if image_layout(graph) == "nhwc":
            raise DoesNotApply("the images of this step have their channels last already")
        changes = turned(graph, setting)
        if not any(change.sort.rows[0][0] in CONVOLVES for change in changes):
            raise DoesNotApply("the step has no convolution whose images could be turned")
        with graph.edit(str(self)) as edit:
            retimed(edit, graph, changes)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return memory.channels_last(tape)


def turned(graph: Graph, setting: Setting) -> list[Change]:
    """What turning the images makes of every sort of kernel that works on them."""
    changes = []
    for sort in kernel_groups(graph):
        if sort.rows[0][0] not in LAID_OUT:
            continue
        dtype = word_of(Dtype, int(graph.dtype[sort.kernels[0]]))
        found = format_change(graph, setting, sort, dtype, dtype, "nhwc")
        if found is not None:
            changes.append(Change(sort, *found, dtype))
    return changes
