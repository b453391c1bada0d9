"""`make test` divides the files of tests among its runs."""

from types import SimpleNamespace

from shared_files import TESTS, begun_here


def test_each_test_is_in_one_run_and_the_tests_of_a_file_are_in_the_same_run(tmp_path):
    files = ["a/test_1.py", "a/test_2.py", "b/test_1.py"]
    tests = [SimpleNamespace(path=TESTS / file, name=f"{file} {n}") for n in range(2) for file in files]
    runs = [begun_here(tests, tmp_path), begun_here(tests[::-1], tmp_path)]
    taken = [[], []]
    while len(taken[0]) + len(taken[1]) < len(tests):
        for run, names in zip(runs, taken, strict=True):
            names += [test.name for test in [next(run, None)] if test]
    assert sorted(taken[0] + taken[1]) == sorted(test.name for test in tests)
    assert taken[0] and taken[1]
    first, second = ({name.split()[0] for name in names} for names in taken)
    assert not first & second
    assert [next(run, None) for run in runs] == [None, None]
