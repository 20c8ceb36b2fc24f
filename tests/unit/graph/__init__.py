"""Tests of the graph's values."""
