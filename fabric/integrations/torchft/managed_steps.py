"""torchft's Manager over a session: one step of the job between ``start_quorum`` and ``should_commit``.

``start_quorum`` announces a step. The first forward of the step (or a question about the members) joins the
step, and loads the job's state into a replica that is behind. When backward ends, the gradients are averaged
and the step is committed. ``should_commit`` then says whether there is an update. A failure repeats the
exchange inside of fabric, so the script never sees a step that failed.
"""

import atexit
import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp
from torch.futures import Future

import fabric.client
from fabric.client.attach import ends_with_a_sentence
from fabric.client.gradients.forward_buffers import default_buffers
from fabric.client.loop.loop_orders import LoopOrder
from fabric.client.loop.unshared_objects import tensors_in
from fabric.client.outer.outer_loop import OuterLoop
from fabric.client.process import excepthook
from fabric.errors import ConfigError, FabricError
from fabric.integrations.torchft.arguments import parse_arguments
from fabric.integrations.torchft.checkpointing import check_transport
from fabric.protocol.messages import member_events as io
from fabric.runtime.living_objects import living


class RegisteredState:
    """The shared state of a script besides model and optimizers, with ``state_dict`` and ``load_state_dict``.

    Entries of the script's functions that are the state of the model or of an optimizer are left out, because
    fabric carries these itself.
    """

    def __init__(self) -> None:
        self.batches_committed = 0
        self.is_loading = False  # the script's own functions are loading a state
        self._model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.functions: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def set_model(self, model: torch.nn.Module) -> None:
        """Take the model. Raises ConfigError for a second one."""
        if self._model is not None:
            raise ConfigError(
                "two models are wrapped in DistributedDataParallel, and a Manager takes one: wrap a module "
                "that holds both"
            )
        self._model = model

    def training_objects(self) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return the model and the optimizers. Raises ConfigError where one is missing."""
        if self._model is None:
            raise ConfigError(
                "the Manager has no model: wrap it in fabric.integrations.torchft.DistributedDataParallel"
            )
        if not self.optimizers:  # a script that calls should_commit itself wraps none
            self.optimizers = _optimizers_of(self._model)
        if not self.optimizers:
            raise ConfigError(
                "the Manager has no optimizer: wrap it in fabric.integrations.torchft.OptimizerWrapper"
            )
        return self._model, self.optimizers

    def is_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the ``.grad`` of a parameter of the model."""
        if self._model is None:
            return False
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        return any(x is tensor or x.data_ptr() == tensor.data_ptr() for x in gradients)

    def state_dict(self) -> dict[str, Any]:
        """Return what the script's functions give, without the states that fabric carries itself."""
        own = {key: self._own(save()) for key, (_, save) in self.functions.items()}
        return {"batches_committed": self.batches_committed, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand a state to the script's functions, with the present states of model and optimizers."""
        self.batches_committed = int(state["batches_committed"])
        self.is_loading = True
        try:
            for key, own in state["own"].items():
                load, save = self.functions[key]
                if own:
                    load({**save(), **own})
        finally:
            self.is_loading = False

    def _own(self, saved: Any) -> dict[str, Any]:
        if not isinstance(saved, dict):
            raise ConfigError(
                f"the script's state_dict function returned a {type(saved).__name__}: return a dict"
            )
        states = [] if self._model is None else [self._model.state_dict()]
        states += [x.state_dict() for x in self.optimizers]
        memory = {x.data_ptr() for x in tensors_in(states) if x.numel()}
        return {key: value for key, value in saved.items() if not self._is_carried(value, memory)}

    def _is_carried(self, value: Any, memory: set[int]) -> bool:
        """Whether ``value`` is the state of the model or of an optimizer."""
        if not isinstance(value, dict) or not value:
            return False
        if all(isinstance(x, torch.Tensor) for x in value.values()):
            return all(x.data_ptr() in memory for x in value.values() if x.numel())
        groups = [x.state_dict()["param_groups"] for x in self.optimizers]
        return set(value) == {"state", "param_groups"} and value["param_groups"] in groups


def _optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the only living optimizer of ``model``, if there is one. Raises ConfigError for several."""
    held = {id(parameter) for parameter in model.parameters()}
    own = [x for x in living(torch.optim.Optimizer) if "param_groups" in vars(x)]
    optimizers = [x for x in own if any(id(p) in held for group in x.param_groups for p in group["params"])]
    if len(optimizers) > 1:
        raise ConfigError(
            f"{len(optimizers)} optimizers have parameters of the Manager's model: wrap each of them in "
            "fabric.integrations.torchft.OptimizerWrapper"
        )
    return optimizers


_T = TypeVar("_T")
_PARTICIPANTS = "torchft participants"  # the metric that counts the contributions to a step


class ExceptionWithTraceback(Exception):
    """An error that the script has reported, as torchft's Manager returns it."""

    def __init__(self, error: Exception) -> None:
        self.original_exception = error
        self.stack_trace = "".join(traceback.format_exception(error))
        super().__init__(f"{error}\n{self.stack_trace}")


class AveragedWork:
    """The work of an ``allreduce``: done when the gradients of the step are averaged."""

    def __init__(self, manager: "Manager", tensor: torch.Tensor) -> None:
        self._manager, self._tensor = manager, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Average the gradients of the step, if that is still to do. Raises FabricError within a backward."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch's only word for it
            raise FabricError(
                "the work of an allreduce was awaited while backward runs, when other gradients are not "
                "complete: wait after backward"
            )
        self._manager.settle_gradients()
        return True

    synchronize = block_current_stream = wait

    def get_future(self) -> Future[Any]:
        """Return a future that has the averaged tensor already, after a ``wait``."""
        self.wait()
        done: Future[Any] = Future()
        done.set_result(self._tensor)
        return done


class Manager:
    """One replica of a job, with the methods of torchft's Manager. Not thread-safe.

    ``pg``: one of the names of process groups. ``state_dict`` and ``load_state_dict``: the script's own
    shared state, a dict. The state of the model and of the optimizer in it travels once, as fabric's own.
    ``named``: see ``ManagerArguments``. A mistake of the user ends the process with one sentence.
    """

    def __init__(
        self,
        pg: Any,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta = timedelta(seconds=60),
        **named: Any,
    ) -> None:
        with ends_with_a_sentence():
            arguments = parse_arguments({"use_async_quorum": use_async_quorum, "timeout": timeout, **named})
            check_transport(arguments.checkpoint_transport)
            self.settings = arguments.settings(pg, min_replica_size)
        self._waits_at_once = not arguments.use_async_quorum
        self.registered = RegisteredState()
        self._session: fabric.client.Session | fabric.client.SoloSession | None = None
        self._first_step = 0  # the step of a checkpoint that the script has loaded
        self._announced = False  # start_quorum was called, and the step is not over
        self._order: LoopOrder | None = None  # of the step that this replica has joined
        self._loop: OuterLoop | None = None  # of LocalSGD or DiLoCo
        self._step: Any = None  # the newest committed step
        self._update_due = False  # the script has not yet asked should_commit about it
        self._error: ExceptionWithTraceback | None = None
        self._failed = False  # the script has raised, or fabric is at work: an end of the process is a death
        excepthook.on_uncaught.append(self._note_failure)
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)

    # --- what the script registers ------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add a part of the shared state under ``key``, before the first step."""
        if self._session is not None:
            raise ConfigError("register_state_dict_fn was called after the first step: call it before")
        self.registered.functions[key] = load_state_dict, state_dict

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Set the script's own part of the shared state, before the first step."""
        self.register_state_dict_fn("default", load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Do nothing: fabric copies the state while the step computes, and notices a write to it."""

    def disallow_state_dict_read(self) -> None:
        """See ``allow_state_dict_read``."""

    # --- a step -------------------------------------------------------------------------------------------

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Announce a step; the optimizer's ``zero_grad`` calls this."""
        if self._loop is not None:
            raise ConfigError(
                "start_quorum was called with LocalSGD or DiLoCo, which begin their own steps: leave it out"
            )
        if not allow_heal or shrink_only:
            what = "shrink_only=True" if shrink_only else "allow_heal=False"
            raise ConfigError(
                f"start_quorum got {what}, and fabric decides itself when a replica joins: leave it out"
            )
        self._error = None
        if self._order is not None:
            return  # the step that was announced before goes on
        self._update_due, self._announced = False, True
        if self._waits_at_once:
            self.begin_step()

    def begin_outer(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        begin: Callable[[dict[str, Any], dict[str, Any]], OuterLoop],
    ) -> OuterLoop:
        """Join the job with the outer steps of LocalSGD or DiLoCo, which ``begin`` makes.

        ``begin`` takes the shared state besides model and optimizers, and the other arguments.
        """
        if self._session is not None:
            raise ConfigError("LocalSGD or DiLoCo was entered after the first step: enter one, once")
        self.registered.set_model(model)
        self.registered.optimizers += optimizers
        with self._at_work():
            loop = begin({"torchft": self.registered}, {"step": self._first_step, **self.settings})
        atexit.register(self._on_exit)
        self._session, self._loop = loop.session, loop
        return loop

    def wait_quorum(self) -> None:
        """Join the announced step."""
        self.begin_step()

    def begin_step(self) -> None:
        """Join the announced step, if that is still to do: the state here is then that of the job's step."""
        if not self._announced or self._order is not None or self._update_due:
            return
        session = self._attached()
        if isinstance(session, fabric.client.Session):
            with self._at_work():
                order = session.reach_boundary()
                if isinstance(order, io.Finish):
                    session.end_step(order)  # ends this process with a sentence
            self._order = order

    def average_gradients(self) -> None:
        """Average the gradients of the step over the members, once, and commit the step.

        A replica whose script has reported an error contributes nothing, and gets the average of the others.
        """
        if self._update_due:
            raise FabricError(
                "a second backward pass came after the gradients of this step were averaged: run all but the "
                "last backward pass of a step within no_sync()"
            )
        if not self._announced:
            raise FabricError(
                "backward came before start_quorum: call the optimizer's zero_grad() at the top of each step"
            )
        self.begin_step()
        session, weight = self._attached(), 0.0 if self._error is not None else 1.0
        if isinstance(session, fabric.client.SoloSession):
            session.metrics(**{_PARTICIPANTS: 1.0})
            self._step = session.exchange()
        else:
            with self._at_work():
                self._step = self._exchange(session, weight)
            self._order = None
        self._update_due = True
        self.registered.batches_committed += self._contributors()

    def settle_gradients(self) -> None:
        """Average the gradients of the step, if that is still to do."""
        if not self._update_due:
            self.average_gradients()

    def _exchange(self, session: fabric.client.Session, weight: float) -> fabric.client.Step:
        order = self._order
        assert order is not None
        while isinstance(order, io.Compute):
            session.metrics(**{_PARTICIPANTS: weight})
            session.contribute(order, weight)
            weight = 0.0  # a gradient that was contributed stays so when the round is redone
            order = session.orders.next()
        return session.end_step(order)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step; return whether the optimizer makes an update, which is equal on all replicas.

        It is false where no replica contributed, and where ``FABRIC_ON_NAN`` skips the step.
        """
        self.settle_gradients()
        self._update_due = self._announced = False
        return not self._step.skipped

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> AveragedWork:
        """Average a gradient of the model. Its ``wait`` averages all gradients of the step.

        Raises ConfigError for another tensor, another operation, or quantization.
        """
        if should_quantize:
            raise ConfigError(
                "allreduce got should_quantize=True: leave it out, and set FABRIC_EXCHANGE=int8 on all "
                "replicas"
            )
        if reduce_op != ReduceOp.AVG:
            raise ConfigError(f"allreduce got {reduce_op}, and fabric averages gradients: use ReduceOp.AVG")
        if not self.registered.is_gradient(tensor):
            raise ConfigError(
                f"allreduce got a tensor of shape {tuple(tensor.shape)} that is the .grad of none of the "
                "model's parameters: fabric averages the gradients of the model of DistributedDataParallel"
            )
        return AveragedWork(self, tensor)

    def report_error(self, e: Exception) -> None:
        """Report that the gradient of this step is corrupt: this replica then contributes nothing.

        After the average it is too late for that: the average is complete, and equal on all replicas.
        """
        self._error = ExceptionWithTraceback(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the error that was reported in this step."""
        return self._error

    def wrap_future(self, fut: Future[_T], default: _T, timeout: timedelta | None = None) -> Future[_T]:
        """Return a future that has ``default`` where ``fut`` fails; the failure is reported."""
        if timeout is not None:
            raise ConfigError("wrap_future got a timeout, which fabric does not keep: leave it out")

        def settle(done: Future[_T]) -> _T:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001 - any failure of the user's future
                self.report_error(error)
                return default

        return fut.then(settle)

    # --- reading --------------------------------------------------------------------------------------------

    def current_step(self) -> int:
        """Return the number of committed steps whose update is made here."""
        if self._session is None:
            return self._first_step
        return self._session.committed_step - self._update_due

    def batches_committed(self) -> int:
        """Return the sum of the contributors of all committed steps. Raises ConfigError with DiLoCo."""
        if self._loop is not None:
            raise ConfigError("batches_committed is not counted with LocalSGD and DiLoCo: use current_step")
        return self.registered.batches_committed - (self._contributors() if self._update_due else 0)

    def num_participants(self) -> int:
        """Return how many replicas contributed to the step; before backward, the members of the epoch."""
        if self._is_averaged("num_participants"):
            return self._contributors()
        return max(len(self._attached().members), 1)

    def participating_rank(self) -> int | None:
        """Return this replica's place among the members; None while it catches up."""
        if not self.is_participating():
            return None
        session = self._attached()
        if isinstance(session, fabric.client.SoloSession):
            return 0
        return session.members.index(session.settings.replica)

    def is_participating(self) -> bool:
        """Whether this replica's gradient counts in the step; false while it catches up."""
        if self._is_averaged("is_participating"):
            return bool(self._step.contributed)
        return not isinstance(self._order, io.Apply)

    def state_dict(self) -> dict[str, int]:
        """Return the step and the batches committed, for a checkpoint of the script."""
        if self._loop is not None:
            return {"step": self.current_step()}
        return {"step": self.current_step(), "batches_committed": self.batches_committed()}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Begin at the step of a checkpoint that the script has loaded, before its first step.

        Within the script's own ``load_state_dict`` it does nothing: fabric has set the step. Raises
        ConfigError after the first step.
        """
        if self.registered.is_loading:
            return
        if self._session is not None:
            raise ConfigError("the Manager's load_state_dict was called after the first step: call it before")
        self._first_step = int(state_dict["step"])
        self.registered.batches_committed = int(state_dict.get("batches_committed", 0))

    # --- beginning and end --------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job: this replica's loop has ended. It waits until all loops have ended."""
        session, self._session = self._loop or self._session, None
        atexit.unregister(self._on_exit)
        if self._note_failure in excepthook.on_uncaught:
            excepthook.on_uncaught.remove(self._note_failure)
        if session is not None:
            session.close()
            self._first_step = session.committed_step

    def _attached(self) -> fabric.client.Session | fabric.client.SoloSession:
        """Return the session; the first call joins the job."""
        if self._session is None:
            model, optimizers = self.registered.training_objects()
            session = fabric.client.attach(
                model,
                optimizers[0] if len(optimizers) == 1 else optimizers,
                state={"torchft": self.registered},
                buffers=default_buffers(model),
                unshared="ignore",  # the script's state_dict has its schedulers, where fabric cannot see them
                step=self._first_step,
                **self.settings,
            )
            atexit.register(self._on_exit)  # after attach, so that it runs before the session's own
            self._session = session
            if isinstance(session, fabric.client.Session):
                with self._at_work():
                    session.start_exchanges({"loop": "torchft"})
        return self._session

    def _contributors(self) -> int:
        return int(self._step.metrics.get(_PARTICIPANTS, 0.0))

    def _is_averaged(self, asked: str) -> bool:
        """Whether the newest step has its average; else join the announced step. Raises FabricError."""
        if self._update_due or (self._step is not None and not self._announced):
            return True
        if self._loop is not None:
            return False
        if not self._announced:
            raise FabricError(f"{asked} was called before the first step: call zero_grad() first")
        self.begin_step()
        return False

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Let an end of the process within this context be a death, or what fabric has decided."""
        self._failed = True
        yield
        self._failed = False

    def _note_failure(self, _: BaseException) -> None:
        self._failed = True

    def _on_exit(self) -> None:
        # A script of torchft ends without a word when it has made its steps. An end within a step, or by an
        # exception, is a death.
        if not self._failed and self._order is None:
            self.shutdown()
