"""The arguments of ``fabric local``, and how it deals out the devices of a host."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.cli.local import _devices_of, local
from fabric.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    [
        *("FABRIC_LIGHTHOUSE", "FABRIC_TOKEN_FILE", "FABRIC_REPLICA", "FABRIC_REPLICAS", "FABRIC_DISABLE"),
        *("FABRIC_JOURNAL", "FABRIC_RUN_DIR", "FABRIC_BIND"),
    ],
)
def test_a_setting_that_would_not_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    result = CliRunner().invoke(local, ["--out", str(tmp_path / "out"), "train.py"])
    assert isinstance(result.exception, ConfigError)
    assert f"would not use {name}: unset it" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--replicas", "0", "train.py"], "0 is not in the range"),
        (["--ranks", "0", "train.py"], "0 is not in the range"),
        ([], "Missing argument"),
    ],
)
def test_a_bad_argument_starts_nothing(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(local, ["--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2 and sentence in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.py"], "there is no script none.py in "),
        (["--no-python", "no-such-program"], "there is no program no-such-program"),
        (["--no-python", "-m", "train"], "contradict each other"),
    ],
)
def test_a_script_that_does_not_exist_starts_nothing(tmp_path, arguments, sentence):
    result = CliRunner().invoke(local, ["--out", str(tmp_path / "out"), *arguments])
    assert isinstance(result.exception, ConfigError) and sentence in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ((), [None, None]),
        (("0",), ["0", "0"]),  # all replicas share what cannot be divided
        (("0", "1"), ["0", "1"]),
        (("0", "1", "2"), ["0", "1"]),  # replicas are equal
        (("0", "1", "GPU-a", "GPU-b"), ["0,1", "GPU-a,GPU-b"]),
    ],
)
def test_each_replica_gets_an_equal_part_of_the_devices(
    devices: tuple[str, ...], parts: list[str | None]
) -> None:
    given = [_devices_of(number, 2, devices).get("CUDA_VISIBLE_DEVICES") for number in range(2)]
    assert given == parts
