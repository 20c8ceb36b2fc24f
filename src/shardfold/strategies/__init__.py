"""Splits that people choose by hand: named strategies, pins, and the roles of dims they go by."""
