"""The files of an adopted script: what the script reads, and the step that it goes on at, are of one file."""

from types import SimpleNamespace

import torch

from fabric.integrations.adopt.adopted_loop import SavedFiles


def loop_at(number):
    loop = SimpleNamespace(number=number, session=object(), is_writer=True, begun=[])
    loop.data = SimpleNamespace(batches_per_step=1, skipped=0)
    loop.resume_at = lambda step, batches, skipped: loop.begun.append(step)
    return loop


def test_a_file_that_the_writer_replaces_while_it_is_read_is_read_again(tmp_path):
    path, writer, reader = tmp_path / "snapshot.pt", loop_at(10), loop_at(0)
    SavedFiles(writer, "job").save(torch.save, {"epoch": 2}, path)
    read = []

    def load(f):
        value = torch.load(f)
        if not read:
            writer.number = 15
            SavedFiles(writer, "job").save(torch.save, {"epoch": 3}, path)
        read.append(value["epoch"])
        return value

    value = SavedFiles(reader, "job").load(load, path)
    assert (value["epoch"], reader.begun, read) == (3, [15], [2, 3])
