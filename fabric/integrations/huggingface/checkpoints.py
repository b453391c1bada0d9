"""The checkpoint folders of a FabricTrainer: one replica writes them, under a temporary name first."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.trainer_utils import rotate_checkpoints

from fabric.errors import FabricError


class CheckpointFiles:
    """The folders of ``trainer``, in its ``output_dir``."""

    def __init__(self, trainer: Any) -> None:
        self.staging: Path | None = None  # where a checkpoint is written before it gets its name
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir)

    def save(self, write: Callable[[], None], session: Any) -> None:
        """Let the Trainer write a checkpoint on the one replica that writes, and then give it its name."""
        trainer, folder = self._trainer, self._folder
        name = f"checkpoint-{trainer.state.global_step}"
        best = trainer.state.best_global_step
        best_folder = folder / f"checkpoint-{best}"
        if best and (best == trainer.state.global_step or best_folder.is_dir()):
            trainer.state.best_model_checkpoint = str(best_folder)
        if not session.is_writer:
            return
        if session.loads:
            self._complete_history()
        self.staging = folder / f".writing-{session.settings.replica}"
        shutil.rmtree(self.staging, ignore_errors=True)
        try:
            write()
            if best:
                trainer.state.best_model_checkpoint = str(best_folder)
                trainer.state.save_to_json(str(self.staging / name / "trainer_state.json"))
            shutil.rmtree(folder / name, ignore_errors=True)
            (self.staging / name).rename(folder / name)
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging = None
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _complete_history(self) -> None:
        """Take what was logged before this replica joined from the newest checkpoint of another writer."""
        history = self._trainer.state.log_history
        now = self._trainer.state.global_step
        first = min((entry["step"] for entry in history), default=now)
        names = [x.name[11:] for x in self._folder.glob("checkpoint-*")]
        for step in sorted((int(x) for x in names if x.isdigit() and int(x) < now), reverse=True):
            path = self._folder / f"checkpoint-{step}/trainer_state.json"
            with contextlib.suppress(OSError, ValueError, KeyError):
                earlier = json.loads(path.read_text())["log_history"]
                history[:0] = [entry for entry in earlier if entry["step"] < first]
                return

    @contextlib.contextmanager
    def at_the_end(self, is_writer: bool) -> Iterator[None]:
        """Let the Trainer end: it loads the best model on all replicas, and deletes on one."""
        trainer = self._trainer
        args, best = trainer.args, trainer.state.best_global_step
        kept = args.save_total_limit
        if args.load_best_model_at_end and best:
            folder = self._folder / f"checkpoint-{best}"
            if folder.is_dir():
                trainer.state.best_model_checkpoint = str(folder)
            elif not is_writer:
                raise FabricError(
                    f"load_best_model_at_end: this replica has no {folder}, which another replica wrote: "
                    "give all replicas one output_dir that they share"
                )
        if not is_writer:
            args.save_total_limit = None
        try:
            yield
        finally:
            args.save_total_limit = kept
