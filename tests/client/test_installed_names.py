"""A replica names the state that it has loaded as its own kind of device does, and checks the other name."""

import pytest
import torch

from fabric.ckpt_server.format.manifest import part_digest
from fabric.ckpt_server.state.device_digest import digest_of_file
from fabric.ckpt_server.state.training_state import capture, host_bytes
from fabric.client.loop.local_state import LocalState
from fabric.errors import IntegrityError

VIEW = capture({"model": torch.nn.Linear(3, 5)}, 4)
FILE = memoryview(bytearray(VIEW.header + b"".join(bytes(host_bytes(x)) for _, x in VIEW.tensors)))
STATE = digest_of_file(FILE)


def loaded(on_device: bool) -> LocalState:
    state = LocalState.__new__(LocalState)
    state._on_device, state._content = on_device, None
    state.digest, state.run = (lambda: STATE if on_device else VIEW.digest()), lambda work: work()
    return state


@pytest.mark.parametrize("on_device", [False, True])
def test_a_state_from_either_kind_of_device_gets_the_name_of_this_kind(on_device):
    own = STATE if on_device else VIEW.digest()
    from_host = {"digest": VIEW.digest()}
    from_device = {"digest": VIEW.digest(), "state": STATE}
    for manifest in (from_host, from_device):
        assert loaded(on_device).name_installed(FILE, manifest) == own
    assert [part_digest(x) == own for x in (from_host, from_device)] == [not on_device, on_device]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_manifest_that_names_another_state_than_that_of_its_file_is_refused(on_device):
    with pytest.raises(IntegrityError, match=f"its digest is {STATE}, and its manifest names {'0' * 32}"):
        loaded(on_device).name_installed(FILE, {"digest": VIEW.digest(), "state": "0" * 32})
