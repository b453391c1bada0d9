"""The GPU tests' code on host memory, so that the GPU tests fail for the GPU's reasons alone."""

from rings import check_all_reduce


def test_all_reduce_between_processes():
    check_all_reduce("host", 2, ["ipc", "tcp"], chunk=4096)
