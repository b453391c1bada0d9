"""The newest report or refusal of a failed attempt of each replica, until the replica attaches."""

from dataclasses import dataclass, replace

# The most reports that are kept; beyond it the oldest are forgotten.
_KEPT = 100
_MOST_ATTACHED = 20_000


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """How the newest attempt of a replica ended, in its launcher's words."""

    replica: str
    host: str
    why: str
    gave_up: bool  # the launcher starts the replica no more
    is_spare: bool
    at: float  # Unix seconds; `LaunchReports` keeps the time of the first failure in a row
    last_line: str = ""  # of the attempt's standard error; empty where the launcher does not know it
    stopped_by: int = 0  # the signal that ended the launcher, and ``why`` names it; 0: none
    is_refused: bool = False  # the lighthouse refused the attempt's session, and ``why`` says so

    @property
    def sentence(self) -> str:
        """Return the reason without the attempt's number, so that equal ends have equal sentences."""
        if self.stopped_by or not self.host:  # a refusal has no host
            return self.why
        return f"{self.why}; its launcher {'gave up' if self.gave_up else 'starts it again'}"


class LaunchReports:
    """The newest report of each replica that has not attached since."""

    def __init__(self) -> None:
        self.newest: dict[str, LaunchReport] = {}
        # The replicas that have attached since their last report: an eviction counts these attempts.
        self._attached: dict[str, None] = {}

    def since(self, replica: str, now: float) -> float:
        """Return when the first of the replica's failures in a row was reported."""
        before = self.newest.get(replica)
        return before.at if before is not None else now

    @property
    def given_up(self) -> list[str]:
        """The replicas that their launchers start no more, the oldest report first."""
        return [name for name, report in self.newest.items() if report.gave_up]

    def ends_attached(self, replica: str) -> bool:
        """Whether the attempt that ended now had a session. The next attempt has none yet."""
        return self._attached.pop(replica, self) is None

    def forget_before(self, at: float) -> bool:
        """Forget the reports of earlier times; return whether there were any."""
        old = [name for name, report in self.newest.items() if report.at < at]
        for name in old:
            del self.newest[name]
        return bool(old)

    def take(self, report: LaunchReport) -> None:
        """Keep ``report`` in the place of the replica's earlier one."""
        refusal = self.newest.pop(report.replica, None)
        if refusal is not None and refusal.is_refused and not refusal.host:
            # The first report after a refusal is about the refused process, and the refusal says more.
            report = replace(report, why=refusal.why, last_line="", is_refused=True)
        self.newest[report.replica] = report
        while len(self.newest) > _KEPT:
            del self.newest[next(iter(self.newest))]

    def refuse(self, replica: str, why: str, at: float) -> None:
        """Note that the lighthouse has refused a session of the replica."""
        self.newest.pop(replica, None)
        self.take(LaunchReport(replica, "", f"refused: {why}", True, False, at, is_refused=True))

    def attached(self, replica: str) -> None:
        """Forget the report of a replica that has a session again."""
        self.replaced(replica)
        self._attached[replica] = None
        if len(self._attached) > _MOST_ATTACHED:
            del self._attached[next(iter(self._attached))]

    def replaced(self, replica: str) -> None:
        """Forget the report of a replica whose place is taken."""
        self.newest.pop(replica, None)
