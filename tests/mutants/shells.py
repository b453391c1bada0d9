"""Deliberate bugs in overlap, outer steps, collectives and the launcher: one small change each."""

from mutants.mutant import Mutant

from fabric.cli.launch import restart_policy
from fabric.cli.launch.restart_policy import DeviceHistory, RestartPolicy
from fabric.cli.launch.standbys import Standbys
from fabric.client.attach import _lanes
from fabric.client.collectives import calls
from fabric.client.collectives.collectives import CollectiveMembers, Collectives
from fabric.client.gradients.bucket_stream import BackwardCount, BucketReadiness, Overlap, SentGradients
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.outer.outer_loop import GlobalParameters, JobRounds, OuterLoop, OuterUpdates
from fabric.client.state.fetch_thread import PieceFetcher
from fabric.ftar.lanes import FlatPlaces
from fabric.protocol.nodes import NodeEnd

SHELLS = (
    # the exchange during backward
    Mutant(
        "a late value is handed over with the end of backward",
        Overlap.__init__,
        "if not bucket.late",
        "",
        "client/test_overlap.py::test_late_values_are_final_when_the_order_ends",
    ),
    Mutant(
        "a gradient is final with the first addition to it",
        BackwardCount.expected,
        "self._before.get(key, 1 if self.calls_before else math.inf)",
        "1",
        "client/test_overlap.py::test_a_gradient_is_final_when_backward_has_added_to_it_as_often_as_before",
    ),
    Mutant(
        "an addition more than expected goes unseen",
        Overlap.ready,
        "self._sent.changed = True",
        "pass",
        "client/test_overlap.py::test_an_addition_that_ddp_reports_once_more_than_before_is_noticed",
    ),
    Mutant(
        "a write that changes no version goes unseen",
        SentGradients.end,
        "not all(shared)",
        "False",
        "client/test_overlap.py::test_each_change_after_a_gradient_was_sent_is_noticed",
    ),
    Mutant(
        "a change during backward goes unseen",
        SentGradients.note_addition,
        "self._sent[key] = gradient",
        "pass",
        "client/test_overlap.py::test_each_change_after_a_gradient_was_sent_is_noticed",
    ),
    Mutant(
        "an abort ends the waits of later rounds",
        BucketReadiness.wait,
        "epoch <= self._aborted[0]",
        "self._aborted[0]",
        "client/test_overlap.py::test_an_abort_ends_the_waits_of_its_epoch_and_not_of_a_later_one",
    ),
    Mutant(
        "lanes gather buckets before they are final",
        ExchangeThread._exchange_lanes,
        "stream.wait(bucket, epoch)",
        "()",
        "ftar/test_lane_exchange.py::test_late_values_arrive_in_any_layouts_with_any_weights_while_backward_runs",
    ),
    Mutant(
        "lanes look for late values where they would be without overlap",
        FlatPlaces.__init__,
        ", late=late",
        "",
        "ftar/test_rank_lanes.py::test_the_places_are_those_of_the_flat_gradients",
    ),
    Mutant(
        "a rank that catches up reads late values at wrong places",
        PieceFetcher._from,
        "FlatPlaces(row, self._lanes.late)",
        "FlatPlaces(row)",
        "client/test_gradient_pieces.py::test_every_rank_gets_its_part_from_any_layout",
    ),
    Mutant(
        "a rank knows no late values of other ranks",
        _lanes,
        "for x in ranks for name",
        "for x in [own] for name",
        "client/test_unequal_limits.py::test_a_rank_without_the_buffers_knows_the_places_of_those_of_other_ranks",
    ),
    Mutant(
        "a new server costs a round that is not applied its slot",
        GradientSlots.reset,
        "by_use[-2:]",
        "by_use[-1:]",
        "ckpt_server/test_gradient_slots.py"
        "::test_the_slot_of_a_round_that_is_not_applied_yet_is_never_given_away",
    ),
    # outer steps
    Mutant(
        "every outer step exchanges the first fragment",
        OuterUpdates.hand_over,
        "step % self.schedule.fragments",
        "0",
        "client/test_outer_loop.py::test_only_the_fragment_in_turn_and_its_optimizer_state_change",
    ),
    Mutant(
        "the other fragments' optimizer state moves",
        OuterUpdates.apply,
        "self.shared.keep_gradient(fragment)",
        "pass",
        "client/test_outer_loop.py::test_a_commit_moves_its_fragment_alone_and_leaves_no_gradient",
    ),
    Mutant(
        "a replica that gave nothing keeps its parameters",
        OuterUpdates.apply,
        "if step.contributed:",
        "if True:",
        "client/test_outer_loop.py::test_a_replica_that_gave_nothing_begins_from_the_global_parameters",
    ),
    Mutant(
        "the outer gradient is applied again",
        OuterUpdates.apply,
        "self._outer.zero_grad(set_to_none=True)",
        "pass",
        "client/test_outer_loop.py::test_a_commit_moves_its_fragment_alone_and_leaves_no_gradient",
    ),
    Mutant(
        "a loaded state leaves the local parameters",
        JobRounds.open,
        "if session.loads != loads:",
        "if False:",
        "client/test_outer_loop.py::test_a_loaded_state_replaces_the_local_parameters",
    ),
    Mutant(
        "inner steps without data have a weight",
        JobRounds.hand_over,
        "1.0 if session.take_drawn() else 0.0",
        "float(session.take_drawn() or 1)",
        "client/test_outer_loop.py::test_inner_steps_without_data_give_no_weight",
    ),
    Mutant(
        "a redone round of another step gets the old gradient",
        JobRounds._note,
        "order.step == self._order.step and ",
        "",
        "client/test_outer_loop.py::test_a_redone_round_gets_the_pseudo_gradient_again_only_where_it_was_dropped",
    ),
    Mutant(
        "a gradient against replaced parameters is handed over",
        JobRounds._note,
        " and self._session.loads == self._loads",
        "",
        "client/test_outer_loop.py::test_a_redone_round_gets_the_pseudo_gradient_again_only_where_it_was_dropped",
    ),
    Mutant(
        "a kept gradient is counted twice",
        JobRounds._note,
        "self._weight if dropped and same else 0.0",
        "self._weight",
        "client/test_outer_loop.py::test_a_redone_round_gets_the_pseudo_gradient_again_only_where_it_was_dropped",
    ),
    Mutant(
        "a replica that fell behind opens no round",
        JobRounds.commit,
        "if step.replayed:",
        "if False:",
        "client/test_outer_loop.py::test_a_replica_that_fell_behind_opens_the_next_round_at_once",
    ),
    Mutant(
        "the model keeps local parameters at the end",
        OuterLoop.close,
        "self._shared.load()",
        "pass",
        "client/test_outer_loop.py::test_diloco_alone_is_a_plain_loop",
    ),
    Mutant(
        "the pseudo-gradient has the other sign",
        GlobalParameters.set_gradient,
        "x.shared - x.local",
        "x.local - x.shared",
        "client/test_outer_loop.py::test_diloco_alone_is_a_plain_loop",
    ),
    Mutant(
        "alpha mixes the wrong way round",
        GlobalParameters.load,
        "x.local.lerp_(x.shared, 1 - alpha)",
        "x.local.lerp_(x.shared, alpha)",
        "client/test_outer_loop.py::test_diloco_alone_is_a_plain_loop",
    ),
    Mutant(
        "a result is used one inner step late",
        OuterLoop._after_inner_step,
        "self._made >= self._schedule.delay",
        "self._made > self._schedule.delay",
        "client/test_outer_loop.py::test_diloco_alone_is_a_plain_loop",
    ),
    Mutant(
        "a loop goes on past its end",
        OuterLoop._before_inner_step,
        "self.committed_step >= self._until",
        "self.committed_step > self._until",
        "client/test_outer_loop.py::test_a_closure_and_a_loop_that_goes_on_too_long_are_refused",
    ),
    Mutant(
        "an exchange that this replica missed is not noticed",
        JobRounds.poll,
        "isinstance(self._arrived, io.Apply) and self._arrived.prepared is None",
        "False",
        "client/test_outer_loop.py::test_a_replica_that_fell_behind_opens_the_next_round_at_once",
    ),
    Mutant(
        "inner steps after a contribution count for it",
        OuterLoop._after_inner_step,
        "self._made, self._under_way = 0, True",
        "self._under_way = True",
        "client/test_outer_loop.py::test_diloco_alone_is_a_plain_loop",
    ),
    # collectives
    Mutant(
        "the newest call goes first",
        calls.judge,
        "min((x.key for x in frames",
        "max((x.key for x in frames",
        "client/test_replica_collectives.py::test_the_earliest_collective_that_any_member_calls_goes_first",
    ),
    Mutant(
        "a call begins before all members have called",
        calls.judge,
        "None if others else Go()",
        "Go()",
        "client/test_replica_collectives.py::test_a_result_of_the_generation_before_is_not_kept_for_the_same_step",
    ),
    Mutant(
        "a forced epoch takes no member out of a collective",
        CollectiveMembers.group,
        "if newest.forced > phase.epoch:",
        "if False:",
        "client/test_replica_collectives.py::test_a_forced_epoch_takes_a_dead_member_out_of_the_collectives_of_a_step",
    ),
    Mutant(
        "a member that committed counts as a newcomer",
        CollectiveMembers.begin_step,
        "not x.joining or (before is not None and before.lists(x.replica, x.incarnation))",
        "not x.joining",
        "client/test_replica_collectives.py::test_a_newcomer_is_no_member_of_a_step_before_its_first_commit",
    ),
    Mutant(
        "a newcomer takes part before its first commit",
        CollectiveMembers.begin_step,
        "if not x.joining or",
        "if True or",
        "client/test_replica_collectives.py::test_a_newcomer_is_no_member_of_a_step_before_its_first_commit",
    ),
    Mutant(
        "another store's record of this number is kept",
        CollectiveMembers.note,
        "before is not None and before.fence != record.fence",
        "False",
        "client/test_replica_collectives.py::test_a_store_that_counts_its_epochs_anew_takes_no_record_away",
    ),
    Mutant(
        "the record of a prepared round is forgotten",
        CollectiveMembers._forget_before,
        "announced[: announced.index(epoch)]",
        "announced[: announced.index(epoch) + 1]",
        "client/test_replica_collectives.py::test_the_epochs_before_a_committed_step_are_forgotten",
    ),
    Mutant(
        "a result of the generation before is given",
        Collectives._perform,
        " and self._held[1].generation == job.group.record.generation",
        "",
        "client/test_replica_collectives.py::test_a_result_of_the_generation_before_is_not_kept_for_the_same_step",
    ),
    Mutant(
        "a repeated call gets another number",
        Collectives._fail,
        "self._calls = min(self._calls, job.key[2])",
        "pass",
        "client/test_replica_collectives.py::test_a_late_member_ends_the_call_of_the_others_and_the_repeated_call_succeeds",
    ),
    # the launcher
    Mutant(
        "one restart more than allowed",
        RestartPolicy.may_restart,
        "self.restarts < self.most",
        "self.restarts <= self.most",
        "cli/test_restart_policy.py::test_used_up_restarts_pass_the_first_failures_code_on",
    ),
    Mutant(
        "a standby becomes a rank of another environment",
        Standbys.take,
        "standby.environment == _lasting(environment) and ",
        "",
        "cli/test_standbys.py::test_a_rank_starts_without_a_standby_that_does_not_fit_or_does_not_answer",
    ),
    Mutant(
        "a long run does not end the pauses",
        RestartPolicy.judge,
        "0 if end.ran_s >= HEALTHY_S else self._quick + 1",
        "self._quick + 1",
        "cli/test_restart_policy.py::test_quick_deaths_are_restarted_more_and_more_slowly",
    ),
    Mutant(
        "a rank that lost its peer ends the replica",
        RestartPolicy.judge,
        "final and not has_cause",
        "final",
        "cli/test_restart_policy.py::test_only_final_exit_codes_end_the_launcher",
    ),
    Mutant(
        "an error of long ago excludes a device",
        DeviceHistory.note,
        "if now - t < DEVICE_ERRORS_WITHIN_S",
        "",
        "cli/test_restart_policy.py::test_a_device_is_used_no_more_after_its_second_error_within_half_an_hour",
    ),
    Mutant(
        "a refused layout is tried again",
        restart_policy.choose_layout,
        "x not in refused and ",
        "",
        "cli/test_restart_policy.py::test_fewer_devices_lead_to_the_next_layout_that_the_script_builds",
    ),
    Mutant(
        "a layout is chosen for devices that are not there",
        restart_policy.choose_layout,
        " and x.ranks <= devices",
        "",
        "cli/test_restart_policy.py::test_fewer_devices_lead_to_the_next_layout_that_the_script_builds",
    ),
    Mutant(
        "a death by a signal has no exit code of its own",
        RestartPolicy.judge,
        "END_BY_SIGNAL - code if code < 0 else code",
        "abs(code)",
        "cli/test_restart_policy.py::test_used_up_restarts_pass_the_first_failures_code_on",
    ),
    Mutant(
        "one failed rank hides another's success",
        NodeEnd.is_clean,
        "set(self.codes.values()) == {0}",
        "0 in self.codes.values()",
        "cli/test_restart_policy.py::test_only_final_exit_codes_end_the_launcher",
    ),
)
