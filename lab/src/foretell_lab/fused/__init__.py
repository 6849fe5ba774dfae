"""Fused regions: made from real models and at random, measured, and a model of their time trained.

python -m foretell_lab.fused make -o regions.txt.gz      regions, as text
python -m foretell_lab.fused measure regions.txt.gz ...  their times on the device at hand
python -m foretell_lab.fused train ...                   the network of `foretell.cost.fused`
"""
