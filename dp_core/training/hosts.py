"""Training on several hosts: each adds up the gradients of its own units; the first does the rest.

The first host, the *chief*, draws who takes part, adds the noise, makes the update and keeps the
checkpoints. The others, its *helpers*, are told the weights, the clip norm and who was drawn; they
answer with the clipped sum over their own units. So a helper has no seed, and cannot add noise: it
is added once because there is one who can.

*Units.* Host k of n owns an unbroken stretch of the units (`share`), and reads no other's rows.
The chief draws from all units at once, truncation included, and every host keeps what is its own:
the union over hosts is the batch of a single host, exactly.

*Sums.* The hosts form a chain: 0, the chief, then 1, 2, … On the way up each host receives the sum
of those behind it, adds its own, and sends the result on to the host before it, a piece at a time;
on the way down it passes on what it gets. So each link carries the model once each way, however
many hosts there are, and sums are added in one fixed order. What is one float32 sum on one host is
a sum of n parts here: weights agree to rounding, and are the same bits for the same n.

*Faults.* A host that dies closes its links, the next ones close theirs, and so the chief: within
seconds all have ended, with nothing spent. The training goes on from its last checkpoint.

Links are encrypted, and both ends must know the training's secret (`links`).
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput, ConfideError
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import ModelConfig
from dp_core.privacy.execution_plan import Clipper
from dp_core.training.batches import BatchSource, Indices, MicroBatch, batches_of, prefetch
from dp_core.training.checkpoints import arrays_digest
from dp_core.training.devices import strategy_for
from dp_core.training.links import Link, LinkBroken
from dp_core.training.objectives import Objective, objective_for
from dp_core.training.trainer import GradientSums

if TYPE_CHECKING:
    from dp_core.training.trainer import Trainer

Vector = NDArray[np.float32]
Array = NDArray[Any]
OpenRows = Callable[[Mapping[str, Any]], TokenStore]

_PIECE = 1 << 20  # bytes of an array that travel together
_AHEAD = 8  # micro-batches made in advance
_LAST_WORDS = 2.0  # seconds for what a host said before it closed its link
_CONFIGS: dict[str, Any] = {
    kind.__name__: kind for kind in (BertConfig, Gpt2Config, LlamaConfig, FeedForwardConfig)
}

# Kinds of frames. Down: what to train; who was drawn; what gradients are taken at; that it is over.
_ASSIGNMENT, _DRAWN, _WEIGHTS, _END = 1, 2, 3, 4
# Up: sums with their counts; why a host gives up.
_SUMS, _FAILED = 5, 6


def share(number: int, count: int, n_units: int) -> range:
    """Return the units of host `number` of `count`: shares are stretches, and hold every unit once.

    They differ by one unit at most. Which unit is in which share depends on nothing but its place
    in the store.
    """
    return range(n_units * number // count, n_units * (number + 1) // count)


def rows_digest(store: TokenStore, units: range) -> str:
    """Return SHA-256 over the rows and keys of a share of a store: private, as the rows are."""
    first, last = int(store.unit_rows[units.start]), int(store.unit_rows[units.stop])
    return arrays_digest(
        {
            "tokens": store.tokens[first:last],
            "lengths": store.lengths[first:last],
            "unit_rows": store.unit_rows[units.start : units.stop + 1],
            "unit_keys": store.unit_keys[units.start : units.stop],
        },
        f"{store.n_units} {store.vocabulary_size}",
    )


class Hosts:
    """The helpers, as the chief knows them: `trainer.OtherHosts`, and what begins and ends them.

    Args:
        count: number of hosts, the chief among them; at least 2.
        behind: link to host 1.
        rows: where helpers find the rows, as plain JSON data that their `open_rows` understands.
    """

    def __init__(self, count: int, behind: Link, rows: Mapping[str, Any]) -> None:
        self.count = count
        self._rows, self._link = rows, behind
        self._turn = threading.Lock()  # of a whole message: two threads send
        self._inbox = _Inbox((_SUMS,))
        self._reader = self._inbox.read_from(behind)

    def assign(
        self,
        trainer: Trainer,
        objective: Objective,
        batches: BatchSource,
        *,
        store: TokenStore,
        device: str,
        precision: str,
    ) -> None:
        """Tell the helpers what they need to add up gradients; no seed and no plan is in it.

        Raises:
            BadInput: an objective that helpers do not know.
            ConfideError: a helper is gone.
        """
        clipper, config = trainer.clipper, trainer.config
        weights = trainer.weights()
        frozen = {n: a for n, a in weights.items() if n not in trainer.names}
        if objective.name != objective_for(config).name:
            raise BadInput(
                f"{objective.name} is trained on one host",
                where="CONFIDE_HOSTS",
                fix="Several hosts train language models.",
            )
        flags = objective.continuation
        head = {
            "model": [type(config).__name__, config.to_hf()],
            "trained": [[name, weights[name].shape] for name in trainer.names],
            "frozen": list(frozen),
            "clipper": None if clipper is None else [clipper.style, clipper.engine],
            "precision": precision,
            "device": device,
            "whole_words": flags is not None,
            "batches": batches.settings(),
            "rows": dict(self._rows),
            "digests": [
                rows_digest(store, share(number, self.count, store.n_units))
                for number in range(1, self.count)
            ],
        }
        words = [] if flags is None else [flags.astype(np.uint8)]
        self._send(_ASSIGNMENT, head, [*frozen.values(), *words])

    def tell_drawn(self, step: int, drawn: Indices) -> None:
        """Tell the helpers what update `step` reads, of all hosts. Any thread may."""
        self._send(_DRAWN, {"step": step}, [drawn])

    def start_update(self, step: int, clip_norm: float, weights: Sequence[Vector]) -> None:
        """Give the helpers what gradients of update `step` are taken at."""
        self._send(_WEIGHTS, {"step": step, "clip_norm": clip_norm}, weights)

    def add_up(self, step: int, sums: Sequence[Vector]) -> tuple[list[Vector], NDArray[np.float64]]:
        """Return our sums with each helper's added once, and the helpers' counts (4,).

        Raises:
            ConfideError: a helper is gone, or gave up.
        """
        counts = np.zeros(4)
        totals = [np.empty_like(array) for array in sums]
        own: list[Array] = [*sums, np.zeros(4)]  # the chief keeps its own counts
        merged = _merged(own, self._inbox, step)
        for piece, total in zip(merged, _pieces([*totals, counts]), strict=True):
            total[...] = piece
        return totals, counts

    def check(self) -> None:
        """Raise `ConfideError` if a helper is gone, or gave up."""
        self._inbox.check()

    def end(self) -> None:
        """Tell the helpers that it is over, and close the link."""
        self._inbox.end()
        with contextlib.suppress(ConfideError):
            self._send(_END, {}, [])
        self._link.close()

    def _send(self, kind: int, head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        with self._turn:
            try:
                _send(self._link, kind, head, arrays)
            except LinkBroken:
                self._reader.join(_LAST_WORDS)  # it may have said why
                self._inbox.check()
                raise


class Helper:
    """A helper's links: to the host before it, and to the one behind it if there is one.

    Args:
        number: of this host, from 1.
        count: number of hosts.
        before: link to host `number` − 1.
        behind: link to host `number` + 1, unless this is the last.
    """

    def __init__(self, number: int, count: int, before: Link, behind: Link | None) -> None:
        self.number, self.count = number, count
        self._before, self._behind = before, behind
        kinds = (_ASSIGNMENT, _DRAWN, _WEIGHTS, _SUMS)
        self._inbox = _Inbox(kinds, broken=self._close_links)
        if behind is not None:
            self._inbox.read_from(behind, give_up=lambda body: before.send(_FAILED, body))
        self._inbox.read_from(before, pass_on=None if behind is None else behind.send)

    def assignment(self) -> tuple[dict[str, Any], list[Array]] | None:
        """Wait for what is to be trained; None: nothing, it is over."""
        return self._inbox.message(_ASSIGNMENT)

    def drawn(self) -> Iterator[tuple[int, Indices]]:
        """Yield number and draw of each update, until it is over."""
        while (message := self._inbox.message(_DRAWN)) is not None:
            head, (drawn,) = message
            yield head["step"], drawn

    def weights(self, step: int) -> tuple[float, list[Vector]] | None:
        """Wait for clip norm and weights of update `step`; None: it is over."""
        message = self._inbox.message(_WEIGHTS)
        if message is None:
            return None
        head, weights = message
        _refuse_other_step(head, step)
        return head["clip_norm"], weights

    def send_sums(self, step: int, sums: Sequence[Vector], counts: NDArray[np.float64]) -> None:
        """Send our sums and counts, with those of the hosts behind us added once each."""
        own: list[Array] = [*sums, counts]
        self._before.send(_SUMS, _head({"step": step}, own))
        behind = None if self._behind is None else self._inbox
        for piece in _merged(own, behind, step):
            self._before.send(_SUMS, piece.data.cast("B"))

    def check(self) -> None:
        """Raise `ConfideError` if another host is gone."""
        self._inbox.check()

    def give_up(self, exit_code: int, reason: str) -> None:
        """Tell the hosts before us why we end.

        Args:
            exit_code: of the process.
            reason: in one line, fit for publication.
        """
        body = json.dumps({"number": self.number, "exit_code": exit_code, "reason": reason})
        with contextlib.suppress(ConfideError):
            self._before.send(_FAILED, body.encode())

    def close(self) -> None:
        """Close the links: the others end too, unless it is over."""
        self._inbox.fail(LinkBroken("this host has ended", where="hosts"))
        self._close_links()

    def _close_links(self) -> None:
        for link in (self._before, self._behind):
            if link is not None:
                link.close()


def help_train(helper: Helper, open_rows: OpenRows) -> None:
    """Add up the gradients of our own units, update by update, until the chief says it is over.

    TensorFlow must not have started yet where the device asks for several logical ones.

    Args:
        helper: our links; they are closed.
        open_rows: from `Hosts`' rows to the token store.

    Raises:
        BadInput: the rows are not the chief's.
        ConfideError: another host is gone.
    """
    try:
        assigned = helper.assignment()
        if assigned is not None:
            _train(helper, *assigned, open_rows)
    except ConfideError as error:
        helper.give_up(error.exit_code, str(error))
        raise
    except Exception as error:
        helper.give_up(1, type(error).__name__)  # its message may hold anything
        raise
    finally:
        helper.close()


def _train(
    helper: Helper, head: Mapping[str, Any], arrays: Sequence[Array], open_rows: OpenRows
) -> None:
    store = open_rows(head["rows"])
    own = share(helper.number, helper.count, store.n_units)
    if rows_digest(store, own) != head["digests"][helper.number - 1]:
        raise BadInput(
            "the rows are not those of the first host",
            fix="Let all hosts read one store.",
        )
    kind, fields = head["model"]
    config: ModelConfig = _CONFIGS[kind].from_hf(fields)
    words = arrays[-1].astype(np.bool_) if head["whole_words"] else None
    objective = objective_for(config, words)
    sums = _sums_of(head, config, arrays, objective)
    batches = batches_of(head["batches"], store, objective.examples)

    def made() -> Iterator[tuple[int, MicroBatch | None]]:
        for step, drawn in helper.drawn():
            for batch in batches.made(step, batches.of_units(drawn, own)):
                yield step, batch
            yield step, None

    with contextlib.closing(prefetch(made(), _AHEAD)) as items:
        try:
            _add_up(helper, sums, items)
        except BaseException:
            helper.close()  # or the other thread would wait for a draw
            raise


def _add_up(
    helper: Helper, sums: GradientSums, items: Iterable[tuple[int, MicroBatch | None]]
) -> None:
    begun = -1
    for step, batch in items:
        if step != begun:
            told = helper.weights(step)
            if told is None:
                return
            clip_norm, weights = told
            sums.set_weights(weights)
            if sums.clipper is not None:
                sums.clipper.clip_norm = clip_norm
            begun = step
        if batch is None:
            helper.send_sums(step, *sums.take())
        else:
            helper.check()
            sums.add(batch)


def _sums_of(
    head: Mapping[str, Any],
    config: ModelConfig,
    arrays: Sequence[Array],
    objective: Objective,
) -> GradientSums:
    """Return the accumulators of the assignment's model, its trained weights still to be told."""
    parameters = {name: np.zeros(shape, np.float32) for name, shape in head["trained"]}
    parameters |= zip(head["frozen"], arrays, strict=False)
    clipping = head["clipper"]
    tf.config.experimental.enable_op_determinism()  # as the chief does
    return GradientSums(
        strategy_for(head["device"]),
        config,
        parameters,
        None if clipping is None else Clipper(1.0, *clipping),
        precision=head["precision"],
        row_losses=objective.row_losses,
        trained=[name for name, _ in head["trained"]],
    )


# --- messages: a head in JSON, and arrays in pieces


class _Inbox:
    """What has come over a host's links, by kind, and whether they still hold.

    Each link is read by a thread of its own: that it broke is known at once, and wakes whoever
    waits.

    Args:
        kinds: of frames that may come.
        broken: called at once when a link breaks, from the thread that reads it.
    """

    def __init__(self, kinds: Iterable[int], broken: Callable[[], None] | None = None) -> None:
        self._broken = broken
        self._frames: dict[int, queue.SimpleQueue[bytes | None]] = {
            kind: queue.SimpleQueue() for kind in kinds
        }
        self._changing = threading.Lock()
        self._over = False
        self._failure: ConfideError | None = None

    def read_from(
        self,
        link: Link,
        *,
        pass_on: Callable[[int, bytes], None] | None = None,
        give_up: Callable[[bytes], None] | None = None,
    ) -> threading.Thread:
        """Read a link until it ends.

        Args:
            link: to another host.
            pass_on: sends every frame to the next host.
            give_up: sends the word of a host that gave up to the host before us.
        """

        def read() -> None:
            try:
                while not self._over:
                    kind, body = link.receive()
                    if kind == _END:
                        # Over before the next host hears of it and closes its link; and told to it
                        # before ours are closed by whoever waits for a frame.
                        self._conclude(None)
                        with contextlib.suppress(ConfideError):
                            if pass_on is not None:
                                pass_on(kind, body)
                        self._wake()
                        return
                    if pass_on is not None:
                        pass_on(kind, body)
                    if kind == _FAILED:
                        if give_up is not None:
                            give_up(body)
                        self.fail(_last_words(body))
                    else:
                        self._frames[kind].put(body)
            except ConfideError as error:
                self.fail(error)
            except (KeyError, ValueError):  # no such kind, or no JSON
                self.fail(LinkBroken("a host said what is not understood", where="hosts"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def frame(self, kind: int) -> bytes | None:
        """Wait for the next frame of a kind; None: it is over.

        Raises:
            ConfideError: a link is broken.
        """
        body = self._frames[kind].get()
        if body is None:
            self._frames[kind].put(None)  # for whoever asks next
            self.check()
        return body

    def message(self, kind: int) -> tuple[dict[str, Any], list[Array]] | None:
        """Wait for the next message of a kind: its head, and the arrays; None: it is over."""
        if (body := self.frame(kind)) is None:
            return None
        head = json.loads(body)
        arrays = [np.empty(shape, dtype) for dtype, shape in head.pop("arrays")]
        for piece in _pieces(arrays):
            if (body := self.frame(kind)) is None:
                return None
            piece[...] = np.frombuffer(body, piece.dtype)
        return head, arrays

    def check(self) -> None:
        """Raise what broke the links, if they are broken."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """It is over: whatever the links do from now on is no fault."""
        if self._conclude(None):
            self._wake()

    def fail(self, error: ConfideError) -> None:
        """Take note that the links are broken, the first time, unless it is over."""
        if not self._conclude(error):
            return
        if self._broken is not None:
            self._broken()  # the next host is not to wait until we have time to look
        self._wake()

    def _conclude(self, error: ConfideError | None) -> bool:
        """Take note of how it ends; false if it is over already."""
        with self._changing:
            if self._over:
                return False
            self._failure, self._over = error, True
        return True

    def _wake(self) -> None:
        """Let whoever waits for a frame know that none comes."""
        for frames in self._frames.values():
            frames.put(None)


def _merged(own: Sequence[Array], behind: _Inbox | None, step: int) -> Iterator[Array]:
    """Yield our arrays piece by piece, with the sums of the hosts behind us added."""
    if behind is None:
        yield from _pieces(own)
        return
    head = behind.frame(_SUMS)
    if head is not None:
        _refuse_other_step(json.loads(head), step)
    for piece in _pieces(own):
        body = behind.frame(_SUMS)
        if body is None:
            raise LinkBroken("a host ended before its sums had come", where="hosts")
        yield piece + np.frombuffer(body, piece.dtype)


def _send(link: Link, kind: int, head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    link.send(kind, _head(head, arrays))
    for piece in _pieces(arrays):
        link.send(kind, piece.data.cast("B"))


def _head(head: Mapping[str, Any], arrays: Sequence[Array]) -> bytes:
    return json.dumps({**head, "arrays": [[a.dtype.str, a.shape] for a in arrays]}).encode()


def _pieces(arrays: Sequence[Array]) -> Iterator[Array]:
    """Yield the arrays' values in order, as flat views of at most `_PIECE` bytes."""
    for array in arrays:
        flat, most = array.reshape(-1), _PIECE // array.itemsize
        for start in range(0, flat.size, most):
            yield flat[start : start + most]


def _refuse_other_step(head: Mapping[str, Any], step: int) -> None:
    if head["step"] != step:
        raise LinkBroken(f"update {head['step']} came in place of {step}", where="hosts")


def _last_words(body: bytes) -> ConfideError:
    """Return the error that a host gave up with, as ours: bad input stays bad input."""
    said = json.loads(body)
    kind = BadInput if said["exit_code"] == BadInput.exit_code else ConfideError
    return kind(str(said["reason"]), where=f"host {int(said['number'])}")
