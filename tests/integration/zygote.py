"""Starts trainers quickly: imports torch once, then forks one real process per request on stdin.

``TEST_TRAINER`` in a request's environment names another module than ``tiny_trainer`` to run, and
``TEST_NETNS`` a network namespace to run in.

Requests are JSON lines ``{"environment": {...}, "log": path}``; answers ``{"pid": n}``; when a child ends,
``{"ended": pid, "status": waitpid status}``. The zygote starts no thread before a fork.
``ZYGOTE_IMPORTS`` names further modules to import before any fork.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys

import forked_processes
import odd_trainer  # noqa: F401  (imported before any fork, like everything that imports torch)
import sharded_trainer  # noqa: F401
import tiny_trainer
import torch._dynamo  # a second of every trainer's first optimizer; starts no thread


def child(request: dict) -> None:
    log = os.open(request["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["environment"])
    code = 1
    try:
        if forked_processes.NETWORK in os.environ:
            forked_processes.enter_network(os.environ[forked_processes.NETWORK])
        forked_processes.fork_checkpoint_servers(os.environ[forked_processes.ADDRESS])
        importlib.import_module(os.environ.get("TEST_TRAINER", "tiny_trainer")).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  (the child must never return into the parent's loop)
        code = shown(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def shown(*error: object) -> int:
    """Show an uncaught error as the interpreter itself would; return the exit code."""
    try:
        sys.excepthook(*error)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 1


def make_first_step() -> None:
    """Do here what the first optimizer of each trainer would do once: 5 ms of imports and wrapped functions.

    There is no backward pass, so no thread starts. Nothing of the model is left.
    """
    drawn = torch.random.get_rng_state()
    model, optimizer, scheduler = tiny_trainer.build(8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scheduler.step()
    del model, optimizer, scheduler, parameter
    torch.random.set_rng_state(drawn)
    gc.collect()


def main() -> None:
    for name in os.environ.get("ZYGOTE_IMPORTS", "").split():
        importlib.import_module(name)
    make_first_step()
    forked_processes.keep_imports()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    child(json.loads(line))
                say({"pid": pid})


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say({"ended": pid, "status": status})


def say(message: dict) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
