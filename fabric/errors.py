"""The one error hierarchy. Every message is one sentence: what happened, to whom, and what to do."""


class FabricError(Exception):
    """Base of every error that fabric raises on purpose."""


class ConfigError(FabricError):
    """A setting, argument or environment variable cannot be used as given."""


class ProtocolError(FabricError):
    """Bytes or a message from outside do not follow the protocol."""


class Mismatch(ProtocolError):
    """The programs differ: the other side takes part in another operation, or one of another size."""


class IllegalTransition(FabricError):
    """A state machine was asked for a move that its table does not allow: a bug, never a user error."""


class Unauthorized(FabricError):
    """A token is missing or does not match."""


class Refused(FabricError):
    """The other side understood the request and refused it; the message carries its reason."""


class Unreachable(FabricError):
    """No process answers at an address, or the process there went silent before the link was made."""


class Unconnected(Unreachable):
    """No connection came about: packets do not reach that host, or no process listens there."""


class RoundAborted(FabricError):
    """An exchange ended without a result; the local gradient is untouched and the round is redone."""

    def __init__(self, message: str, about: str = "", waited_for: str = "", mismatch: bool = False) -> None:
        super().__init__(message)
        self.about = about  # the peer that the exchange failed on; empty: the exchange blames no single peer
        self.waited_for = waited_for  # the peer whose bytes were due at the end; empty: no bytes were due
        self.mismatch = mismatch  # whether the peer ``about`` takes part in another exchange


class SessionOver(FabricError):
    """This process has left its job, and its session trains no more."""


class RoundsFailed(SessionOver):
    """As many exchanges in a row failed as FABRIC_ON_ABORT allows; this process has left the job."""


class CollectiveFailed(FabricError, RuntimeError):
    """A collective between replicas ended without a result; the step is not harmed, repeat the same call."""


class NotAMember(FabricError, RuntimeError):
    """This replica takes no part in collectives now, because it catches up or was evicted."""


class StoreError(FabricError):
    """The control store answered with an error; the write was definitely not applied."""


class StoreIndefinite(StoreError):
    """A write timed out or lost its connection: the store may have applied it, or may apply it later."""


class StoreUnavailable(StoreError):
    """The control store could not be reached or has no leader; nothing was applied, try again."""


class StoreReplaced(StoreError):
    """The control store is another one than before, or an older copy: connect and read everything again."""


class LeaseGone(StoreError):
    """A lease has expired or was revoked, and the keys under it are deleted; the write was not applied."""


class StateError(FabricError):
    """Training state cannot be captured, described, fetched or loaded; the target is untouched."""


class IntegrityError(StateError):
    """Bytes do not match their digest."""


class Gone(StateError):
    """A requested step or slot is no longer held; the message lists the steps or slots that are."""


class ServerLost(StateError):
    """This trainer's checkpoint server no longer answers; ``ensure`` starts another one."""
