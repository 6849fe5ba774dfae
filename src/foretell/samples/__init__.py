"""What ships to try the commands on: a training script, and traces."""
