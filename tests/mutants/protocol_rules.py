"""Deliberate bugs in the rules of the protocol: one small change of one rule each."""

from mutants.mutant import Mutant

from fabric.protocol.leader import admission
from fabric.protocol.leader.adaptations import Adaptations, Relayouts
from fabric.protocol.leader.base_choice import BaseChoice
from fabric.protocol.leader.core import Decisions
from fabric.protocol.leader.evictions import RingRebuilder
from fabric.protocol.leader.job_endings import Endings
from fabric.protocol.leader.joins import Joins
from fabric.protocol.leader.liveness import ServerStatuses
from fabric.protocol.leader.orders import OperatorOrders
from fabric.protocol.leader.state import JobState, RosterLimits
from fabric.protocol.member.catch_up import CatchUp
from fabric.protocol.member.ending import Ending
from fabric.protocol.member.links import LinkWatch
from fabric.protocol.member.session import LighthouseSession
from fabric.protocol.member.state import MemberMemory
from fabric.protocol.ranks import FollowerRank, HostVoice, Ranks
from fabric.protocol.rules import assignment, decide
from fabric.protocol.rules.wait_graph import RingRebuilds, StragglerTracker

UNCHANGED = (
    "protocol/test_large_replicas.py"
    "::test_a_leader_that_is_told_that_nothing_changed_decides_as_one_that_is_told_all"
)

RULES = (
    # the statuses of checkpoint servers
    *(
        Mutant(name, ServerStatuses.hear_again, before, after, UNCHANGED)
        for name, before, after in (
            ("an unchanged status keeps the stops of a trainer that runs again", "or last.stops", ""),
            ("an unchanged status of another server counts", "or last.ckpt != status.ckpt", ""),
            ("an unchanged status counts over a closed connection", " and last.connected", ""),
            ("an unchanged status shows no life", "last.seen = now", "pass"),
        )
    ),
    # the end of a loop
    Mutant(
        "a member believes an end of another generation",
        Ending._has_finished,
        "heard[0] == self._memory.state.generation",
        "True",
        "protocol/test_member_end.py::test_a_member_ignores_the_end_of_another_generation",
    ),
    Mutant(
        "an end is not told again over a new link",
        LinkWatch.on_link_lost,
        "self._ending.tell_again(listed)",
        "pass",
        "protocol/test_member_end.py::test_members_hear_of_the_end_again_over_a_new_link_of_the_same_epoch",
    ),
    Mutant(
        "a note of an end counts although the job went on",
        Endings.note_ended,
        " and ended.step >= (self.state.highest_step or 0)",
        "",
        "protocol/test_leader_end.py::test_a_job_end_of_another_store_generation_or_step_is_ignored",
    ),
    Mutant(
        "a note of an end counts in every generation",
        Endings.note_ended,
        "(ended.fence.store_id, ended.fence.generation) != (record.store_id, record.generation)",
        "False",
        "protocol/test_leader_end.py::test_a_job_end_of_another_store_generation_or_step_is_ignored",
    ),
    Mutant(
        "a note of an end counts from any process",
        Endings.note_ended,
        "record.lists(replica, ended.incarnation) and ",
        "",
        "protocol/test_leader_end.py::test_a_job_end_of_another_store_generation_or_step_is_ignored",
    ),
    Mutant(
        "a loop outside that ended at the job's step is refused",
        Endings.refuse_early_ends,
        "step >= top",
        "step > top",
        "protocol/test_leader_end.py::test_a_replica_whose_loop_ended_outside_while_the_job_goes_on_is_refused",
    ),
    Mutant(
        "the end does not wait for a newcomer",
        Endings.complete,
        "any(waited_s < self.state.join_stall_s(x.replica) for x in missing if not x.blocking_join)",
        "False",
        "protocol/test_leader_end.py::test_a_newcomer_that_no_round_waits_for_does_not_delay_the_end_of_the_job",
    ),
    Mutant(
        "the end waits for a newcomer in a blocking join",
        Endings.complete,
        " if not x.blocking_join",
        "",
        "protocol/test_leader_end.py::test_no_member_waits_at_the_end_for_a_newcomer_in_a_blocking_join",
    ),
    Mutant(
        "a job of leaving members never ends",
        Endings.complete,
        " or list(record.roster)",
        "",
        "protocol/test_leader_end.py::test_the_last_member_ends_the_job_though_it_is_to_leave",
    ),
    Mutant(
        "the end of a process that is gone ends the job",
        Endings.known_ends,
        "if name in there or record.member(name) is not None",
        "",
        "protocol/test_leader_end.py::test_a_member_that_finished_and_died_does_not_complete_the_job_that_went_on",
    ),
    Mutant(
        "the leader believes an end of another generation",
        Endings.on_finished,
        "message.fence.generation == self.state.record.generation",
        "True",
        "protocol/test_leader_end.py::test_the_leader_ignores_the_end_of_another_generation",
    ),
    Mutant(
        "an end is told in the generation of the newest epoch",
        LighthouseSession.on_closing,
        "self._memory.state.generation",
        "self._epochs.fence().generation",
        "protocol/test_member_end.py::test_the_end_of_a_loop_is_told_in_the_generation_of_its_state",
    ),
    Mutant(
        "members that finished at other steps end the job",
        Ending._have_all_finished,
        "self.finished_peers.get(x.process) == (record.generation, step)",
        "x.process in self.finished_peers",
        "protocol/test_member_end.py::test_members_that_finished_at_unequal_steps_have_not_ended_the_job",
    ),
    # data that no member can read
    Mutant(
        "a lost part stops the job in its first epochs only",
        Endings.fail,
        'record.sharing.on_loss == "stop"',
        'record.sharing.on_loss == "stop" and record.epoch <= 2',
        "protocol/test_leader_parts.py::test_a_lost_part_stops_the_job_in_a_later_epoch_too",
    ),
    Mutant(
        "a lost part stops the job in planned epochs only",
        Endings.fail,
        'record.sharing.on_loss == "stop"',
        'record.sharing.on_loss == "stop" and not record.is_forced',
        "protocol/test_leader_parts.py::test_a_lost_part_stops_the_job_in_a_later_epoch_too",
    ),
    # the last reader of a part
    Mutant(
        "drains together hide the last reader",
        OperatorOrders._objection_to_drain,
        "(name, *self.draining)",
        "(name,)",
        "protocol/test_leader_parts.py::test_a_drain_under_way_counts_for_the_next_drain",
    ),
    Mutant(
        "a member that leaves counts as a reader",
        OperatorOrders._objection_to_drain,
        "not x.leaving and x.replica not in (name",
        "x.replica not in (name",
        "protocol/test_leader_parts.py::test_a_member_that_leaves_is_no_reader_under_the_next_leader",
    ),
    Mutant(
        "a smaller maximum counts drained members as readers",
        OperatorOrders._drain_surplus,
        "if x is not member and x.replica not in self.draining",
        "if x is not member",
        "protocol/test_leader_parts.py::test_a_smaller_maximum_keeps_a_reader_of_each_part",
    ),
    Mutant(
        "a smaller maximum drains the last reader",
        OperatorOrders._drain_surplus,
        "self._shard_that_only(member.replica, record, others) is not None",
        "False",
        "protocol/test_leader_parts.py::test_a_smaller_maximum_keeps_a_reader_of_each_part",
    ),
    Mutant(
        "a spare takes the place of the last reader",
        Relayouts._may_leave,
        "set(lost_parts(record.sharing, others)) - set(lost_parts(record.sharing, record.roster))",
        "set()",
        "protocol/test_leader_relayouts.py::test_the_last_reader_of_a_part_does_not_leave",
    ),
    Mutant(
        "the data slot of a replica outside is forgotten",
        OperatorOrders._shard_that_only,
        "self.writer.data_slots.get(name, -1)",
        "-1",
        "protocol/test_leader_relayouts.py::test_a_replica_outside_that_alone_can_read_its_part_is_not_drained",
    ),
    Mutant(
        "a maximum drains the oldest members",
        OperatorOrders._drain_surplus,
        "staying[self.limits.most :]",
        "staying[: -self.limits.most]",
        "protocol/test_leader_orders.py::test_a_lower_maximum_lets_the_newest_members_leave_at_a_step_boundary",
    ),
    Mutant(
        "a slow member is drained for a spare that is needed",
        Relayouts._spare_waits,
        "> max(0,",
        ">= max(0,",
        "protocol/test_leader_relayouts.py::test_a_slow_member_is_drained_for_good_only_where_a_spare_stands_by",
    ),
    Mutant(
        "a drain keeps the order to come back",
        OperatorOrders.drain,
        'leaving=True, returns=""',
        "leaving=True",
        "protocol/test_leader_relayouts.py::test_an_operators_drain_takes_the_order_to_come_back_away",
    ),
    # outvoted states, and layouts
    Mutant(
        "reports of unlike layouts are compared",
        decide._digest_split,
        "(report.step, cuts[name])",
        '(report.step, "")',
        "protocol/test_decide.py::test_states_of_unequal_layouts_do_not_disagree",
    ),
    Mutant(
        "snapshots of unlike layouts are compared",
        Joins._agreed_digest,
        '(cuts.get(name, ""), digest)',
        '("", digest)',
        "protocol/test_leader_disputes.py::test_members_of_two_layouts_may_have_two_digests",
    ),
    Mutant(
        "of two sides the younger one stays",
        decide._minority,
        "longest = min(tenures.values())",
        "longest = max(tenures.values())",
        "protocol/test_decide.py::test_a_tie_goes_against_the_shortest_tenure_whatever_the_order_of_the_ring",
    ),
    Mutant(
        "the newest of two goes although it had agreed",
        decide._minority,
        "newest and reports[newest].unconfirmed",
        "newest",
        "protocol/test_decide.py::test_two_members_that_disagree_about_the_state_stop_the_job",
    ),
    Mutant(
        "the state of an outvoted member is trusted",
        decide._outvoted,
        "state=True",
        "state=False",
        "protocol/test_decide.py::test_an_outvoted_member_is_evicted_though_the_majority_is_gone",
    ),
    Mutant(
        "the state of the minority is trusted",
        decide._digest_split,
        "replace(split, state=True) if isinstance(split, Evict) else split",
        "split",
        "protocol/test_decide.py::test_a_majority_of_digests_counts_more_than_tenure",
    ),
    Mutant(
        "half of the holders are a majority",
        BaseChoice._disputed,
        "2 * len(side) <= sum",
        "2 * len(side) < sum",
        "protocol/test_leader_ladder.py::test_of_two_unequal_states_of_one_step_neither_is_believed",
    ),
    Mutant(
        "a wrong state spoils no later state",
        BaseChoice._disputed,
        "x.step >= step",
        "x.step == step",
        "protocol/test_leader_ladder.py::test_a_wrong_state_spoils_the_later_states_of_its_holders",
    ),
    # shares and layouts by order
    Mutant(
        "advice about a process outside is followed",
        Adaptations._follow,
        " or any(x.process not in listed for x in advice.speeds)",
        "",
        "protocol/test_leader_shares.py::test_a_plan_for_a_process_that_another_one_has_replaced_is_dropped",
    ),
    Mutant(
        "a newcomer's share counts in thousandths",
        assignment.asked_share,
        " or not record.lists(member.replica, member.incarnation)",
        "",
        "protocol/test_shares.py::test_the_asked_share_is_read_back_from_the_record_for_every_member",
    ),
    Mutant(
        "the decision gives work by lowered shares only once",
        assignment.for_roster,
        "x.process in listed",
        "x.process not in listed",
        "protocol/test_shares.py::test_a_process_that_left_the_roster_takes_its_speed_with_it",
    ),
    # verdicts on bases and states
    Mutant(
        "a base of another generation clears a verdict",
        BaseChoice.note_loaded,
        "generation == record.generation and is_news",
        "generation and is_news",
        "protocol/test_leader_parts.py::test_only_a_load_of_the_present_base_clears_a_verdict",
    ),
    Mutant(
        "a base that was loaded once counts as usable for ever",
        BaseChoice.note_cannot_load,
        "self.base_loaded_generation != record.generation",
        "not self.base_loaded_generation",
        "protocol/test_leader_parts.py::test_a_base_is_passed_over_only_where_no_member_loaded_it",
    ),
    Mutant(
        "a base that members loaded is passed over",
        BaseChoice.note_cannot_load,
        "message.unusable and self.base_loaded_generation != record.generation",
        "message.unusable",
        "protocol/test_leader_parts.py::test_a_base_that_a_member_has_loaded_is_usable_again",
    ),
    Mutant(
        "a wrong state at the offered step is kept",
        CatchUp.on_sources,
        " or is_wrong",
        "",
        "protocol/test_leader_disputes.py::test_a_replica_outside_loads_the_others_state_where_its_own_differs_at_that_step",
    ),
    Mutant(
        "a state that a healthy server holds too is mistrusted",
        BaseChoice.mistrust,
        "where <= urls",
        "where & urls",
        "protocol/test_leader_ladder.py::test_a_snapshot_that_another_server_holds_too_is_trusted",
    ),
    Mutant(
        "the initial state replaces a disputed one",
        BaseChoice.choose,
        "(*self.unusable, *disputed)",
        "self.unusable",
        "protocol/test_leader_ladder.py::test_where_only_disputed_states_are_left_the_job_stops",
    ),
    Mutant(
        "a checkpoint of the present generation is of another job",
        BaseChoice._foreign,
        "ref.generation > newest",
        "ref.generation >= newest",
        "protocol/test_leader_ladder.py::test_a_cold_start_says_how_many_steps_it_lost_wherever_it_begins",
    ),
    Mutant(
        "a retry does not forgive wrong states",
        BaseChoice.forgive,
        "self.mistrusted.clear()",
        "pass",
        "protocol/test_leader_parts.py::test_a_retry_forgives_states_that_were_called_wrong",
    ),
    Mutant(
        "a member that leaves keeps a suspect state",
        MemberMemory.leave,
        "self.suspect or self.state.outvoted",
        "self.state.outvoted",
        "protocol/test_member.py::test_an_outvoted_member_says_so_in_every_report_until_it_has_another_state",
    ),
    # published gradients
    Mutant(
        "a new leader ends no promise of an earlier one",
        Joins.take_over,
        "session.serves",
        "()",
        "protocol/test_leader.py::test_a_new_leader_ends_the_promises_to_a_newcomer_that_does_not_come_to_it",
    ),
    Mutant(
        "a new leader ends the promises to a newcomer that comes late",
        Joins.serve,
        "self.state.now < self.state.liveness.grace_until",
        "False",
        "protocol/test_leader.py::test_a_new_leader_ends_the_promises_to_a_newcomer_that_does_not_come_to_it",
    ),
    Mutant(
        "a state that was taken before the replica asked is used however old it is",
        Joins.on_request_state,
        "gradients <= min(KEPT - 1, peer.session.replay_steps)",
        "True",
        "protocol/test_own_memory.py::test_a_snapshot_for_a_replaced_host_that_is_too_old_is_not_used",
    ),
    Mutant(
        "members keep a state for ever for a replaced host",
        Joins.expect,
        "self.state.now + EXPECTED_S",
        "1e9",
        "protocol/test_own_memory.py"
        "::test_members_keep_no_gradients_for_ever_for_a_replaced_host_that_never_comes",
    ),
    Mutant(
        "a gradient is asked of one source only",
        CatchUp.fetch_when_behind,
        "urls = tuple(x for x in dict.fromkeys([*self.fetch.urls, *roster]) if x not in own)",
        "urls = tuple(x for x in dict.fromkeys([*self.fetch.urls, *roster]) if x not in own)[:1]",
        "protocol/test_member.py::test_a_newcomer_replays_published_steps",
    ),
    Mutant(
        "a gradient is asked of the state's sources only",
        CatchUp.fetch_when_behind,
        "[*self.fetch.urls, *roster]",
        "self.fetch.urls or roster",
        "protocol/test_member.py::test_a_newcomer_replays_published_steps",
    ),
    Mutant(
        "a gradient's fetch goes on beside a state's",
        CatchUp.want,
        'if old.doing == "gradient":',
        "if False:",
        "protocol/test_member.py::test_the_same_state_of_another_generation_need_not_be_fetched",
    ),
    Mutant(
        "a gradient that is gone is asked for again",
        CatchUp.on_gradient_gone,
        "event.gone or (",
        "(",
        "protocol/test_member.py::test_a_gradient_that_is_gone_means_to_begin_again",
    ),
    Mutant(
        "a gradient is fetched into memory that is read",
        CatchUp.fetch_when_behind,
        "if not self._memory.waiting:",
        "if False:",
        "protocol/test_member.py::test_a_newcomer_replays_published_steps",
    ),
    Mutant(
        "a newcomer's step waits for the next heartbeat",
        CatchUp.on_installed,
        "self._session.hurry()",
        "pass",
        "protocol/test_member_beats.py"
        "::test_a_newcomer_sends_the_step_of_its_state_at_once_because_the_leader_admits_it_by_that",
    ),
    # ranks
    Mutant(
        "a follower obeys after the end",
        FollowerRank.obey,
        "if self.over:",
        "if False:",
        "protocol/test_rank_orders.py::test_a_follower_obeys_until_the_end",
    ),
    Mutant(
        "a follower keeps an old generation",
        FollowerRank.obey,
        "self.generation = command.generation",
        "pass",
        "protocol/test_rank_orders.py::test_a_follower_obeys_until_the_end",
    ),
    Mutant(
        "a follower stops again after the end",
        FollowerRank.lost,
        "if self.over:",
        "if False:",
        "protocol/test_rank_orders.py::test_a_follower_obeys_until_the_end",
    ),
    Mutant(
        "the exchange begins with the first rank's last backward",
        Ranks._take,
        "setdefault(question, {})",
        "setdefault(question, {0: events[0], 1: events[0]} if question[0] == 'backward' else {})",
        "protocol/test_rank_orders.py::test_the_exchange_begins_when_the_last_backward_has_begun_at_every_rank",
    ),
    Mutant(
        "a gradient that changed at one rank is committed",
        Ranks._on_main,
        'next((x.redo for x in answers if x.redo), "")',
        "first.redo",
        "protocol/test_rank_orders.py::test_a_gradient_that_changed_at_one_rank_aborts_the_round_at_all",
    ),
    Mutant(
        "the outcome of an earlier gradient counts",
        Ranks._is_under_way,
        "self._fetch is not None and number == self._fetch.number",
        "True",
        "protocol/test_rank_orders.py::test_a_gradient_that_one_rank_cannot_get_is_wanted_by_none",
    ),
    Mutant(
        "a fetch fails before every rank has ended it",
        Ranks._take,
        "setdefault(question, {})",
        "setdefault(question, {0: events[0], 1: events[0]} if question[0] == 'fetch' else {})",
        "protocol/test_rank_orders.py::test_a_fetch_that_fails_at_one_rank_fails_when_all_have_ended",
    ),
    Mutant(
        "a replica ends before its last snapshot",
        Ranks._close_when_kept,
        'any(at[0] in ("snapshot", "name") for at in self._answers)',
        "False",
        "protocol/test_rank_orders.py::test_the_replica_has_finished_when_its_last_snapshot_is_kept_by_all_ranks",
    ),
    Mutant(
        "rank 0 obeys before the other ranks",
        Ranks._send,
        "self._effects.append(ToSelf(",
        "self._effects.insert(-1, ToSelf(",
        "protocol/test_rank_orders.py::test_a_lost_rank_ends_the_replica_and_rank_0_last",
    ),
    Mutant(
        "the other ranks go on with a gradient that one lacks",
        Ranks._on_one,
        "self._command(io.CancelFetch())",
        "pass",
        "protocol/test_rank_orders.py::test_a_gradient_that_one_rank_cannot_get_is_wanted_by_none",
    ),
    Mutant(
        "a lost link leaves a replica linked",
        Ranks.handle,
        'self._answers.get(("links", record.epoch), {}).pop(0, None)',
        "pass",
        "protocol/test_rank_orders.py::test_a_replica_is_linked_when_all_ranks_are_and_again_after_a_lost_link",
    ),
    Mutant(
        "ranks at unlike steps stand together",
        Ranks._on_main,
        ' or getattr(event, "step", 0) != getattr(first, "step", 0)',
        "",
        "protocol/test_rank_digests.py::test_ranks_that_tell_the_digests_of_different_steps_end_the_replica",
    ),
    Mutant(
        "a voice speaks before all of its ranks have answered",
        HostVoice.take,
        "len(answered) < len(self.ranks) and",
        "len(answered) < len(self.ranks) - 1 and",
        "protocol/test_host_voice.py::test_a_host_speaks_once_when_all_of_its_ranks_have_answered",
    ),
    Mutant(
        "a voice waits for a second answer to one question",
        HostVoice.take,
        "is_first and",
        "",
        "protocol/test_host_voice.py::test_a_rank_that_links_again_is_not_kept_waiting",
    ),
    Mutant(
        "a voice lets what one rank alone says overtake",
        HostVoice.take,
        "self._waiting.append((rank, outcome))",
        "self._waiting.insert(0, (rank, outcome))",
        "protocol/test_host_voice.py::test_what_one_rank_alone_says_goes_at_once_and_after_what_it_said_before",
    ),
    Mutant(
        "a rank has the digest of another round",
        FollowerRank.obey,
        'prepared.gradient_digest or self._digests.get((prepared.epoch, prepared.step), "")',
        'prepared.gradient_digest or next(iter(self._digests.values()), "")',
        "protocol/test_host_voice.py::test_a_rank_knows_the_digest_of_its_own_part",
    ),
    Mutant(
        "two commands of one event are two messages",
        Ranks._send,
        "and not own and not before.own",
        "and False",
        "protocol/test_rank_orders.py::test_commands_that_follow_each_other_are_one_message",
    ),
    # the leader's facts
    Mutant(
        "a session of another store names an epoch",
        JobState.note_named,
        "peer.session.store_id == self.store_id",
        "True",
        "protocol/test_store_restored.py::test_numbers_of_another_store_change_nothing",
    ),
    Mutant(
        "the newest process to speak replaces the roster's",
        admission.unheard,
        "is_heard or now >= liveness.grace_until",
        "True",
        "twin 1",
    ),
    # outvoted states, and layouts
    Mutant(
        "a member does not hear that its state is outvoted",
        Decisions.decide_epoch,
        "not epoch.has(name, Mark.USELESS)",
        "False",
        "reported 0",
    ),
    # the leader's facts
    Mutant(
        "a wait for a process counts against the next one",
        StragglerTracker.forget,
        "self.came(name)",
        "pass",
        "protocol/test_leader_waits.py::test_the_wait_for_a_process_does_not_count_against_its_next_process",
    ),
    Mutant(
        "a complaint about a process counts against the next one",
        RingRebuilds.forget,
        "del self.blame[name], self.stuck[name]",
        "pass",
        "protocol/test_leader_waits.py::test_a_complaint_about_a_process_does_not_count_against_its_next_process",
    ),
    Mutant(
        "the word that a host is gone ends with the lighthouse",
        RosterLimits.recall_overrides,
        "self.state.liveness.note_proof(gone.process, gone.why)",
        "pass",
        "protocol/test_leader_orders.py::test_the_next_lighthouse_knows_that_a_host_is_gone_until_it_is_heard",
    ),
    Mutant(
        "the word that a host is gone outlives a sign of life",
        RosterLimits.forget_gone,
        "any(x.process not in ends for x in self.overrides.gone)",
        "False",
        "protocol/test_leader_orders.py::test_the_next_lighthouse_knows_that_a_host_is_gone_until_it_is_heard",
    ),
    Mutant(
        "replicas that were left out for a link do not count beside a further cut",
        RingRebuilder._left_out_before,
        "if admission.healing.calm_s(x.process)",
        "if False",
        "links 900022",
    ),
)
