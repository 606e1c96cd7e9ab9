"""A cluster of runners behind the server, in this process or in Ray actors (Punica §5)."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from paged.cluster.live import LiveCluster
from paged.cluster.messages import ClusterRequest, Growth, Progress
from paged.requests.sequence import SequenceOutput
from paged.server.owner import ATTEMPT, IDLE_S, Stats
from paged.server.reply import Reply, wake
from paged.server.view import View
from paged.stats import EngineStats, Totals

log = logging.getLogger("paged.server")
# Of runners' totals; what the others count, the cluster knows, also of requests that moved.
SUMMED = (
    "steps", "step_s", "host_s", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions",
    "swapped_units", "copied_blocks", "adapter_loads", "compilations",
)  # fmt: skip


@dataclass
class _Told:
    """A request's reply, and the output tokens that it was told of each sequence."""

    reply: Reply
    tokens: list[int]


class ClusterOwner:
    """One thread drives the cluster, whose runners have been started. Requests move between
    runners; those of a runner that dies go on elsewhere. The runners' engines need the tokenizer,
    or there is no text."""

    def __init__(self, live: LiveCluster):
        self._live, self._cluster = live, live.cluster
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._told: dict[str, _Told] = {}  # the thread's own
        self._totals = Totals()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def _call(self, what: Callable[[], None]) -> None:
        self._inbox.put(what)
        self._live.wake()

    def submit(self, request: ClusterRequest, reply: Reply) -> None:
        self._call(lambda: self._submit(request, reply))

    def abort(self, request_id: str) -> None:
        self._call(lambda: self._abort(request_id))

    def stats(self) -> Future[Stats]:
        answer: Future[Stats] = Future()
        self._call(lambda: answer.set_result(self._stats()))
        return answer

    def view(self) -> Future[View | None]:
        answer: Future[View | None] = Future()
        answer.set_result(None)
        return answer

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and bool(self._cluster.state.gpus)

    def close(self, wait_s: float = 60.0) -> None:
        self._closed = True
        self._live.wake()
        self._thread.join(wait_s)
        self._live.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._live.step(IDLE_S)
                while not self._inbox.empty():
                    self._inbox.get()()
                self._tell()
            except Exception:
                log.exception("the cluster has failed: its requests end")
                self._totals.failed_steps += 1
                self._fail_all()

    def _submit(self, request: ClusterRequest, reply: Reply) -> None:
        adapter, known = request.adapter, self._cluster.adapters
        try:
            if adapter is not None and not known.means(adapter):
                self._cluster.add_known_adapter(adapter)
            self._cluster.submit(
                request.prompt, request.sampling, request.request_id,
                adapter=None if adapter is None else adapter.name, cache_salt=request.cache_salt,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            reply.fail(str(error))
            wake([reply])
            return
        self._told[request.request_id] = _Told(reply, [0] * request.sampling.num_sequences)

    def _abort(self, request_id: str) -> None:
        if self._told.pop(request_id, None) is not None:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Leave nothing of a request, which may have ended without anybody having been told."""
        if request_id in self._cluster.jobs:
            self._cluster.cancel(request_id)
        self._cluster.outputs.pop(request_id, None)
        self._cluster.refused.pop(request_id, None)

    def _tell(self) -> None:
        cluster, new = self._cluster, []
        for request_id, told in list(self._told.items()):
            refused = cluster.refused.pop(request_id, None)
            if (output := cluster.outputs.pop(request_id, None)) is not None:
                event = Progress(request_id, ATTEMPT, (), None if refused else output, refused)
                del self._told[request_id]
            else:
                event = Progress(request_id, ATTEMPT, tuple(self._growth(request_id, told)))
            if (event.growth or output is not None) and told.reply.tell(event):
                new.append(told.reply)
        if new:
            wake(new)
        totals = self._totals
        for record in cluster.records:
            totals.prompt_tokens += record.prompt_tokens
            totals.output_tokens += record.output_tokens
        cluster.records.clear()

    def _growth(self, request_id: str, told: _Told) -> list[Growth]:
        grown = []
        for i, known in enumerate(self._cluster.jobs[request_id].known):
            start, told.tokens[i] = told.tokens[i], len(known.tokens)
            if told.tokens[i] > start:
                logprobs = None if known.logprobs is None else known.logprobs[start:]
                new = SequenceOutput(known.tokens[start:], "", known.finish_reason, logprobs)
                grown.append(Growth(i, start, new))
        return grown

    def _fail_all(self) -> None:
        ended = list(self._told.items())
        self._told.clear()
        for request_id, told in ended:
            self._drop(request_id)
            told.reply.fail("the cluster has failed")
        wake(told.reply for _, told in ended)

    def _stats(self) -> Stats:
        """Of each runner, what it told last: at most a heartbeat ago."""
        cluster, told = self._cluster, self._cluster.figures
        runners = {uuid: told[uuid].engine for uuid in cluster.state.gpus if uuid in told}
        runners["queue"] = EngineStats(running=0, waiting=len(cluster.state.queue))
        totals = replace(self._totals)
        for name in SUMMED:
            total = sum(getattr(figures.totals, name) for figures in told.values())
            setattr(totals, name, total)
        totals.moves = cluster.num_evictions + cluster.num_consolidations + cluster.num_recoveries
        totals.lost_runners = len(self._live.deaths)
        return Stats(runners, totals)
