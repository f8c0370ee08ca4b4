"""Measurements: against peers, and against the physical limit."""
