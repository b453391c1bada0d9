"""What a launcher says of its host: the GPUs by a driver that this test compiles, and the memory."""

import subprocess

import pytest

from fabric.cli.launch import devices
from fabric.cli.launch.lighthouse_words import OtherHosts, WordsThread
from fabric.errors import FabricError
from fabric.protocol.nodes import NodeSays

# Three GPUs, of which the second cannot be opened.
DRIVER = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(unsigned long)(index + 1);
  return index == 1 ? 15 : 0;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  memory->total = 80000000000ULL + (unsigned long)handle;
  memory->free = 1;
  memory->used = 2;
  return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
  strncpy(name, "NVIDIA H100 80GB HBM3", length);
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A host with the driver above."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "driver.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)


@pytest.mark.parametrize(
    ("listed", "kind"),
    [
        (None, ("NVIDIA H100 80GB HBM3", 2, 80.000000001)),
        ("2", ("NVIDIA H100 80GB HBM3", 1, 80.000000003)),
        ("1,2", ("NVIDIA H100 80GB HBM3", 1, 80.000000003)),
        ("GPU-0a,GPU-0b", ("NVIDIA H100 80GB HBM3", 2, 80.000000001)),
        ("", ("", 0, 0.0)),
    ],
)
def test_the_visible_gpus_have_a_kind_a_number_and_a_memory(driver, listed, kind):
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert devices.device_kind(environment) == kind


def test_a_driver_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    monkeypatch.setattr(devices.sys, "executable", "/bin/false")
    with pytest.raises(FabricError, match="does not say which GPUs there are"):
        devices.device_kind({})


def test_a_host_says_what_it_computes_with(driver):
    environment = {"FABRIC_DISABLE": "1", "FABRIC_RACK": "a7"}
    says = OtherHosts(environment, 2, 1, WordsThread()).says
    assert (says.device, says.devices, says.rack) == ("NVIDIA H100 80GB HBM3", 2, "a7")
    assert says.memory_gb > 0 and says.hardware.startswith("2 x NVIDIA H100 80GB HBM3 of 80 GB and ")
    other = NodeSays("x", "host", 0, 2, "", "none", memory_gb=says.memory_gb)
    assert not other.replaces(says) and says.replaces(says)
