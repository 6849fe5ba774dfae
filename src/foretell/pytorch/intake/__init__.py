"""An unchanged training script: run in a process of its own, its step found and watched."""
