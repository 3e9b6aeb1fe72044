"""Loaded by Python itself in whatever a soak's members start by exec (watchdogs, the nursery and so its movers)."""

from chaos import plants

plants.install()
