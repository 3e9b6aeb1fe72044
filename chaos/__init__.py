"""Faults on purpose, in jobs of real processes."""
