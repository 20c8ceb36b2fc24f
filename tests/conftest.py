"""What tests share (the package `virtual`) is imported from this folder."""
