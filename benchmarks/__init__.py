"""Measurements; every figure is a ratio of things timed alternately in one process."""
