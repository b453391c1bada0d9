"""What the GPU tests run, on host memory in a GPU's place: so that they fail for the GPU's reasons alone."""

from rings import check_all_reduce


def test_all_reduce_between_processes():
    check_all_reduce("host", 2, ["ipc", "tcp"], chunk=4096)
