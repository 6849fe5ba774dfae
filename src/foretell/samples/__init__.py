"""Samples to try the commands on: a training script, and traces."""

from pathlib import Path

TRACE = Path(__file__).parent / "traces" / "resnet18-h200.json.gz"  # one step of ResNet-18, H200
