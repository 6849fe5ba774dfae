"""The same work with HolisticTraceAnalysis, run by an interpreter that has it (no foretell there).

    python benchmarks/traces_hta.py TRACE

Its own way to ask "what if": change weights of edges, take the longest path again.
"""

import json
import logging
import os
import resource
import sys
import time
import warnings
from itertools import pairwise

os.environ["CRITICAL_PATH_ADD_ZERO_WEIGHT_LAUNCH_EDGE"] = "1"  # its documentation, for what-ifs
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

from hta.analyzers.critical_path_analysis import CPEdgeType  # noqa: E402
from hta.trace_analysis import TraceAnalysis  # noqa: E402


def length(graph) -> float:
    """Seconds along the critical path."""
    nodes = graph.critical_path_nodes
    return sum(graph.edges[u, v]["weight"] for u, v in pairwise(nodes)) / 1e6


def main() -> None:
    loaded, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)
    found = analysis.critical_path_analysis(rank=0, annotation="ProfilerStep", instance_id=0)
    if found is None:
        raise SystemExit("no critical path")
    graph = found[0]
    before = length(graph)
    stream = graph.trace_df["stream"]
    for u, _, edge in graph.edges(data=True):
        is_span = edge["object"].type is CPEdgeType.OPERATOR_KERNEL
        if is_span and stream.loc[graph.node_list[u].ev_idx] >= 0:
            edge["weight"] /= 2
    graph.critical_path()
    seconds = time.process_time() - loaded
    print(json.dumps({"work": seconds, "loaded": held, "before": before, "after": length(graph)}))


main()
