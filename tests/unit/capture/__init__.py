"""Tests of the way from a module to a graph."""
