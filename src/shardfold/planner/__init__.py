"""The planning loop: propose choices on every mesh, simulate them, take the fastest that fits."""
