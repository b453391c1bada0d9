"""Lets torchtitan train on the CPU: it asks torch for an accelerator, and for figures that only GPUs have.

Import it before torchtitan. The model's attention is that of torch for the CPU, because FlexAttention has no
backward there.
"""

import os
import types

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None
torch.cpu.current_device = lambda: 0
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 is written for a later torch than 2.13
    torch.distributed.set_timeout = lambda timeout, group=None: None
