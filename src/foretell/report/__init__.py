"""Answers for people: tables in the terminal, one HTML page, traces for viewers."""
