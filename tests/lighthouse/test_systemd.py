"""A lighthouse under systemd reports that it is ready, and sends watchdog messages until it hangs."""

import signal
import socket

from lighthouse_support import DEADLINE_S, LighthouseProcess


def test_the_lighthouse_notifies_systemd_until_its_event_loop_hangs(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000")
        with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db") as lighthouse:
            heard = {systemd.recv(100) for _ in range(10)}
            assert heard == {b"READY=1", b"WATCHDOG=1"}
            lighthouse.send(signal.SIGSTOP)
            # After the messages from before the stop, no further message may come.
            systemd.settimeout(1.0)
            try:
                while systemd.recv(100):
                    pass
            except TimeoutError:
                pass
            systemd.settimeout(DEADLINE_S)
            lighthouse.send(signal.SIGCONT)
            assert systemd.recv(100) == b"WATCHDOG=1"
            assert lighthouse.end() == 0
