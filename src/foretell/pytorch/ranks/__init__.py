"""Persistent ranks on this machine, behind links of a set rate and delay."""
