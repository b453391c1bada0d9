"""A real lighthouse whose SQLite store is put back to an older copy goes on above what its members know."""

import shutil
import signal
from pathlib import Path

from lighthouse_support import LighthouseProcess, WireMember, WireStatus, close_all, start_job
from msgspec.structs import replace

from fabric.protocol.messages import network as m


def copy(source: Path, target: Path) -> None:
    """Copy the files of a SQLite store."""
    target.mkdir(exist_ok=True)
    for old in target.glob("store.db*"):
        old.unlink()
    for path in source.glob("store.db*"):
        shutil.copy(path, target / path.name)


async def test_epochs_go_on_above_all_that_members_know_and_a_death_is_answered(http, tmp_path):
    folder, backup = tmp_path / "store", tmp_path / "backup"
    folder.mkdir()
    arguments = ("--limit", "lease-s=1")
    with LighthouseProcess(tmp_path, f"sqlite://{folder}/store.db", arguments=arguments) as lighthouse:
        members = await start_job(http, lighthouse.url)
        lighthouse.end(signal.SIGTERM)
        copy(folder, backup)
        lighthouse.launch(port=lighthouse.port)
        lighthouse.wait_ready()
        known = [WireMember(http, lighthouse.url, f"r{i}", generation=1) for i in range(3)]
        for member in known:
            await member.open()
            await member.epoch(1)
            await member.run()
        status = await WireStatus(http, lighthouse.url, "r2").open()
        await status.beat("gone")
        newest = await known[0].epoch(2)
        assert newest.names == ("r0", "r1")

        lighthouse.end(signal.SIGTERM)
        copy(backup, folder)
        lighthouse.launch(port=lighthouse.port)
        lighthouse.wait_ready()
        back = [WireMember(http, lighthouse.url, f"r{i}", generation=1) for i in range(2)]
        for member in back:
            member.session = replace(
                member.session,
                epoch=2,
                known_generation=1,
                store_id=newest.store_id,
            )
            await member.open()
            await member.say(m.Heartbeat(1, 2, 1, 0, phase="run"))
        record = await back[0].epoch(3)
        assert (record.generation, record.names, record.is_forced) == (1, ("r0", "r1"), True)
        assert "restored from an older copy: its epoch 1 was over" in record.reason
        await close_all([*members, *known, *back])
