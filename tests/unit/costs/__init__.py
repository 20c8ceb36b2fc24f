"""Tests of steps, prices and tables."""
