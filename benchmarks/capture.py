"""How long a capture takes and how much memory it needs, each model in a process of its own.

python benchmarks/capture.py
"""

import json
import subprocess
import sys

from table import Row, show

MODELS = {
    "resnet50": ("resnet50", ""),
    "gpt2": ("GPT-2 small", ""),
    "llama7b": ("Llama 7B, 4096 tokens", ""),
    "llama70b": ("Llama 70B, 4096 tokens", "≤ 60 s, ≤ 2 GiB"),
}
CODE = """
import json, resource, sys, time
from foretell_lab import samples
from foretell.pytorch.capture import capture
name = sys.argv[1]
sample = samples.llama(size=name[5:]) if name.startswith("llama") else getattr(samples, name)()
began = time.perf_counter()
graph = capture(*sample)
print(json.dumps({
    "seconds": time.perf_counter() - began,
    "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "tasks": graph.size,
    "parameters": graph.facts["parameters"],
}))
"""


def rows() -> list[Row]:
    """One row a model."""
    return [_row(name, *said) for name, said in MODELS.items()]


def _row(name: str, title: str, bar: str) -> Row:
    command = [sys.executable, "-c", CODE, name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    figure = (
        f"{found['seconds']:.1f} s, {found['bytes'] / 2**30:.2f} GiB, {found['tasks']:,} tasks, "
        f"{found['parameters'] / 1e9:.2f} B parameters"
    )
    return Row(f"capture {title}", figure, bar)


if __name__ == "__main__":
    show("Capture", rows())
