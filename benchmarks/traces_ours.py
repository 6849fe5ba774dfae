"""One trace read, made a graph, its critical path, one what-if: what `traces.py` measures of us."""

import json
import resource
import sys
import time

from foretell.simulate import simulate
from foretell.trace import read
from foretell.whatif import Setting, parse


def main() -> None:
    loaded, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = read(sys.argv[1], memory=False)  # the others do not look at it either
    before = simulate(trace.graph)
    before.critical_path()
    halved = parse("scale:select=kind=kernel,times=0.5").apply(trace.graph, Setting())
    after = simulate(halved)
    after.critical_path()
    seconds = time.process_time() - loaded
    answer = {"tasks": trace.graph.size, "before": before.seconds, "after": after.seconds}
    print(json.dumps({"work": seconds, "loaded": held, **answer}))


main()
