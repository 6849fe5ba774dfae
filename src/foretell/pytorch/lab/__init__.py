"""A laboratory on one machine: ranks behind shaped links, a matrix of runs, and what was foretold.

Only `models`, `rank` and `notes` import torch; what reads, predicts and fits does without.
"""
