"""Tests of clusters; a package, so that other stages may have test modules of the same name."""
