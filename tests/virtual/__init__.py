"""A mesh of devices in one process: an array for each device, and the plan's steps on them."""
