"""What ``fabric.integrations.ray`` refuses before it asks Ray for anything."""

import pytest
import ray

from fabric.errors import ConfigError
from fabric.integrations import ray as fabric_ray


@pytest.mark.parametrize(
    ("work", "more", "words"),
    [
        ("train.py", {"replicas": 3}, "the work is a function, or a list of words"),
        ([], {"replicas": 3}, "the work is a function, or a list of words"),
        (print, {"replicas": 3, "nodes": 2}, "a replica of several nodes is started by `fabric launch`"),
        (print, {"replicas": 0}, 'FABRIC_REPLICAS is "0": give a count'),
        (print, {"replicas": "8:2"}, "the first number must not exceed the second"),
        (print, {"replicas": 3, "lighthouse": "lh0:8600"}, 'FABRIC_LIGHTHOUSE has "lh0:8600": give URLs'),
        (print, {"replicas": 3, "token_file": "/no/such/token"}, "/no/such/token"),
    ],
)
def test_a_mistake_is_named_before_a_cluster_is_asked(work, more, words):
    with pytest.raises(ConfigError, match=words):
        fabric_ray.run(work, **more)
    assert not ray.is_initialized()


def test_an_old_release_of_ray_is_refused(monkeypatch):
    monkeypatch.setattr("fabric.integrations.arguments.metadata.version", lambda _: "2.9.3")
    with pytest.raises(
        ConfigError, match=r"ray 2\.9\.3 is installed, and fabric.integrations.ray needs 2\.50"
    ):
        fabric_ray.run(print, replicas=3)


def test_a_disabled_job_is_refused(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    with pytest.raises(ConfigError, match="each replica would train alone"):
        fabric_ray.run(print, replicas=3)
