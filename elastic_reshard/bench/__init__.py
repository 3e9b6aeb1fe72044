"""Measuring programs behind `elastic-reshard bench`, and the real processes they run in."""
