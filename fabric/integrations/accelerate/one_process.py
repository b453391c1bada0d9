"""accelerate in a replica of one process, under any launcher.

``fabric launch`` sets the variables of torchrun. On a host with a device, and with ``cpu=True``, accelerate
takes them for a distributed training: it makes a process group, wraps the model and cuts the data.
"""

import contextlib
from collections.abc import Iterator

from accelerate.state import AcceleratorState, DistributedType, PartialState

from fabric.errors import ConfigError
from fabric.runtime.config import launched_ranks
from fabric.runtime.process_environment import without_launcher


@contextlib.contextmanager
def one_process(adapter: str) -> Iterator[None]:
    """Within this context let accelerate see one process. Raises ConfigError for a replica of several ranks.

    ``adapter``: the name of our class, for the sentence.
    """
    ranks = launched_ranks()
    if ranks > 1:
        raise ConfigError(
            f"{adapter} is one process per replica, and this replica has {ranks} ranks: start each one as "
            "a replica of its own, with fabric launch --ranks 1"
        )
    # Let accelerate look again where the script has asked it before, and it has found one process.
    state = PartialState._shared_state  # noqa: SLF001
    kind = state.get("distributed_type", DistributedType.NO)
    if kind.value.startswith("MULTI_") and state.get("num_processes") == 1:
        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    with without_launcher():
        yield
