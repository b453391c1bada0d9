"""The GPU tests' code on host memory, so that the GPU tests fail for the GPU's reasons alone."""

import pytest
from rings import check_all_reduce


@pytest.mark.parametrize(("planes", "chunk"), [(["ipc", "tcp"], 4096), (["tcp4"], 2**20)])
def test_all_reduce_between_processes(planes, chunk):
    check_all_reduce("host", 2, planes, chunk)
