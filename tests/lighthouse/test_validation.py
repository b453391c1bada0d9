"""Names, policies and messages from outside, checked and bounded before a core hears them."""

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError, ProtocolError
from fabric.lighthouse.connections.validation import (
    MOST_REPLICAS,
    check_name,
    decode_member,
    decode_statuses,
    parse_policy,
)
from fabric.lighthouse.jobs.job_history import job_of, record_key
from fabric.model import Fence, SnapshotRef
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire


class TestValidation:
    def test_a_policy_has_a_least_and_a_most(self):
        assert parse_policy("3", 9.0).start_replicas == 3 and parse_policy("3", 9.0).min_replicas == 1
        assert (
            parse_policy("3", 9.0).max_replicas == MOST_REPLICAS
            and parse_policy("3", 9.0).start_wait_s == 9.0
        )
        ranged = parse_policy("2:8", 9.0)
        assert (ranged.min_replicas, ranged.start_replicas, ranged.max_replicas) == (2, 8, 8)
        assert parse_policy("", 9.0).start_replicas == 1
        assert parse_policy("50000", 9.0).max_replicas == 50_000
        for bad in ("0", "0:1", "3:2", "a", "1:2:3", "-1"):
            with pytest.raises(ConfigError):
                parse_policy(bad, 9.0)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 65, "a\n"])
    def test_a_name_is_short_and_of_plain_characters(self, name):
        with pytest.raises(ProtocolError):
            check_name("job", name)

    def test_a_message_that_no_member_sends_is_refused(self):
        fence = Fence("s", 1, 1)
        for message in (
            m.Complete(fence, 1),
            m.CommitVote(fence, 1, 1, ""),
            m.TrainerStatus("r", 1, "gone", 1),
        ):
            with pytest.raises(ProtocolError):
                decode_member(wire.encode(message).decode())
        assert decode_member(wire.encode(m.Running(fence, 1)).decode()) == m.Running(fence, 1)

    @pytest.mark.parametrize("ages_s", [(1.0, 2.0), (-0.1,)])
    def test_ages_of_snapshots_fit_them(self, ages_s):
        status = m.TrainerStatus("r0", 1, "running", 1, "", (SnapshotRef(1, 5, "d"),))
        for good in ((), (0.5,)):
            assert decode_statuses(wire.encode(replace(status, ages_s=good)).decode())[0].ages_s == good
        with pytest.raises(ProtocolError, match="ages_s"):
            decode_statuses(wire.encode(replace(status, ages_s=ages_s)).decode())

    def test_sentences_are_cut_and_printable(self):
        aborted = decode_member(wire.encode(m.Aborted(Fence("s", 1, 1), 1, "a\nb" + "x" * 999)).decode())
        assert aborted.why.startswith("a bx") and len(aborted.why) == 300

    def test_a_store_key_names_its_job(self):
        assert job_of("ns", record_key("ns", "gpt-2")) == "gpt-2"
        assert job_of("ns", "/fabric/ns/jobs/gpt-2/other") == ""
