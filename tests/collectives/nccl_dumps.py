"""Dumps in the form of torch's Flight Recorder for NCCL, version 2.10, generated here.

They do not come from a run on GPUs. The fields, their types and the states follow torch's
``FlightRecorder.hpp`` and ``FlightRecorderDetail.hpp`` of 2.13.
In a pickle a missing time is None, in JSON it is 0.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

START_NS = 1_795_391_562_000_000_000


def entry(
    number: int,
    operation: str = "all_reduce",
    size: Sequence[int] = (1024,),
    dtype: str = "Float",
    group: Sequence[str] = ("0", "default_pg"),
    state: str = "completed",
    **more: Any,
) -> dict[str, Any]:
    """One call. ``more`` replaces fields."""
    created = START_NS + number * 10_000_000
    times = {"completed": (created, created + 5_000_000), "started": (created, None)}
    started, completed = times.get(state, (None, None))
    is_p2p = operation.startswith(("send", "recv"))
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": tuple(group),
        "thread_id": "140241254153088",
        "thread_name": "python",
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": created,
        "input_sizes": [list(size)],
        "input_dtypes": [dtype],
        "output_sizes": [list(size)],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/v/site-packages/torch/distributed/distributed_c10d.py",
                "line": 3,
            },
            {"name": "train", "filename": "/home/user/train.py", "line": 41},
        ],
        **more,
    }


def dump(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, Sequence[int]]]
) -> dict[str, Any]:
    """A dump; ``groups`` by name: description and ranks."""
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))}
            for name, (description, ranks) in groups.items()
        },
        "pg_status": {"0": {"last_enqueued_collective": 1, "last_started_collective": 1}},
        "entries": list(entries),
    }


def pickled(body: object) -> bytes:
    """As torch writes it: the second protocol."""
    return pickle.dumps(body, protocol=2)
