"""Reads a plan file: YAML, or JSON where PyYAML is not installed."""

import importlib
import json
from pathlib import Path
from typing import Any

from fabric.drill.schedule.drill_schedule import DrillSchedule, parse_plan
from fabric.errors import ConfigError

_MAX_BYTES = 1 << 20


def read_plan(path: Path) -> DrillSchedule:
    """Read and check the plan at ``path``. Raises ConfigError with one sentence."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"the plan {path} is over {_MAX_BYTES} bytes: shorten it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan {path} cannot be read ({error}): name a YAML file") from error
    return parse_plan(_decode(text, path), str(path))


def _decode(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"the plan {path} is no JSON, and PyYAML is missing: write JSON, or pip install pyyaml"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = " ".join(str(error).split())[:200]
        raise ConfigError(f"the plan {path} is no YAML ({place}): correct it") from error
