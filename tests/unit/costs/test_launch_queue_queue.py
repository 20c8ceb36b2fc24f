from shardfold.costs.launch_queue import Asked, queued_seconds


def test_a_slow_host_and_a_slow_device() -> None:
    assert queued_seconds([Asked(3.0, 1.0)] * 4) == 13.0  # the host's, and the last kernel
    assert queued_seconds([Asked(1.0, 3.0)] * 4) == 13.0  # the first launch, and the device's


def test_the_host_runs_ahead_of_a_long_kernel() -> None:
    small, large = Asked(1.0, 0.5), Asked(1.0, 10.0)
    assert queued_seconds([large, *[small] * 5]) == 13.5
    assert queued_seconds([*[small] * 5, large]) == 16.0


def test_waiting_brings_both_together() -> None:
    assert queued_seconds([Asked(1.0, 5.0), Asked(0.0, 2.0, waits=True), Asked(1.0, 1.0)]) == 10.0


def test_nothing_takes_no_time() -> None:
    assert queued_seconds([]) == 0.0
