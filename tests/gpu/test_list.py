"""Every GPU test has the date of its last pass here; docs/benchmarks.md names those that have never run."""

import re
from pathlib import Path

from forked_processes import TORCH, run_python

ROOT = Path(__file__).parents[2]
NEVER = "never run"
# GPU test of this folder -> the date of its last pass.
LAST_PASS = {
    "test_gpu.py::test_streams_are_ordered_by_events_and_callbacks_run": "2026-11-28",
    "test_gpu.py::test_work_on_a_stream_does_not_block_the_host": "2026-11-28",
    "test_gpu.py::test_registered_host_memory_is_copied_to_without_blocking_and_released": "2026-11-28",
    "test_gpu.py::test_memory_that_cannot_be_registered_leaves_no_error_behind": "2026-11-28",
    "test_gpu.py::test_gradients_of_a_model_on_the_gpu_by_way_of_the_flat_buffer": "2026-11-28",
    "test_gpu.py::test_all_reduce_of_processes_on_one_gpu": "2026-11-28",
    "test_gpu.py::test_a_member_is_killed_in_the_midst_of_an_exchange": "2026-11-28",
    "test_gpu.py::test_lanes_of_unequal_layouts_on_one_gpu": "2026-11-28",
    "test_gpu.py::test_nccl_refuses_two_members_on_one_gpu_and_the_round_is_aborted": "2026-11-28",
    "test_gpu.py::test_nccl_between_gpus": NEVER,
    "test_gpu.py::test_a_job_on_one_gpu_loses_a_member_and_ends_bitwise_equal": "2026-11-28",
    "test_gpu.py::test_buckets_go_out_while_backward_runs_on_one_gpu": "2026-11-28",
    "test_gpu.py::test_the_kernel_of_triton_makes_the_sums_of_torch": "2026-11-28",
    "test_gpu_snapshot.py::test_cuda_snapshot_while_the_optimizer_goes_on": "2026-11-28",
    "test_gpu_snapshot.py::test_a_digest_on_the_gpu_is_that_of_its_boundary": "2026-11-28",
}


def collected() -> set[str]:
    command = ("-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu")
    shown = run_python(*command, imports=TORCH, cwd=str(ROOT))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return {line.partition("[")[0] for line in shown.stdout.splitlines() if line.startswith("tests/")}


def test_the_table_lists_every_gpu_test_and_no_other():
    assert {f"tests/gpu/{test}" for test in LAST_PASS} == collected()


def test_the_page_names_the_oldest_pass_and_every_test_that_has_never_run():
    section = (ROOT / "docs/benchmarks.md").read_text().split("\n## GPU\n")[1].split("\n## ")[0]
    passes = [last for last in LAST_PASS.values() if last != NEVER]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", last) for last in passes)
    assert f"on {min(passes)} ([list]" in section
    named = set(re.findall(r"`(test_\w+)`", section))
    assert named == {test.partition("::")[2] for test, last in LAST_PASS.items() if last == NEVER}


def test_all_gpu_tests_are_in_this_folder():
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.parent != Path(__file__).parent:
            assert not re.search(r"mark\.gpu\b", path.read_text()), path
