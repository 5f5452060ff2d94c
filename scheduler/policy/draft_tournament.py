"""How many draft lanes run, where they are read, and how often: the tournament that finds it (docs/speculation.md).

What is minimised: seconds a token of S active sequences. A candidate is (lanes n, depth d, asks m, pause e): a chain has at
most n draft lanes, and any coda that runs reads its last row for a draft if that has run d loops. A coda is asked for by heads
that have exited and by chains of fewer than m draft lanes whose last row may be read, so that of n lanes the last n - m start for the price of their rows.
Boundary stages (coda + prelude) come e core steps after the last ones at the soonest. n = 0 is to run without drafts. On
instances small enough for value iteration the best candidate is within 1.4 % of the optimum (tests/policy); without m it is up
to 11 % off where a boundary costs more than a core step. The time per token is

    (core steps * core + lanes run * core_row + codas * coda + coda rows * coda_row
     + preludes * prelude + prelude rows * prelude_row) / tokens,

linear in counts that depend on depths, acceptance and the rules of chains alone. So the counts are played, in a small
simulation, and the fitted costs are applied when a verdict is asked for. A cost that changes needs no new play.

All candidates see the same traffic. The exit depth at position p of a sequence is one of the successive depths its slot had
lately, and a draft of position p that was read after d loops is right iff u_p < acceptance[d], with one number u_p a position:
what a shallow read knows, a deeper one knows, too. Between two boundaries every row runs a loop, unless it has exited or has run
as many as one ahead whose planes are not filled (scheduler/lanes.py). A boundary reads exited rows, heads and guesses
alike, starts drafts, and then::

    lane           0 (head)   1          2              by age
    input          certain    right      wrong
    read           yes        yes        no             two tokens, the chain starts anew at lane 2

Sixteen sequences are played, in groups that share their stages: of one sequence each where one is active, of sixteen where
sixteen or more are. More than a group count as so many groups that share their stages.

Approximations: the result of a boundary is known before the next core step (the scheduler waits for it, or goes on where that
costs less); a sequence that ends is followed by one like it; all requests may have drafts; without drafts codas are timed by the
pause, where ``auto`` has a better rule (coda_timing), of which a few percent are known to be the gain.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from depthbatch.common.frames import Int32Array, lanes_of_a_slot

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SEQUENCES = 16
_DRAWS = 509  # numbers u_p a sequence, in turn: a prime, so that they do not fall in step with the depths
_MIN_ROUNDS = 32.0  # before the verdict counts,
_SURE_ROUNDS = 250.0  # and before it hardly gets better
_KEEP = 0.998  # of the counts, a round
_CHANGED = 0.04  # acceptance: what was played at another one is discounted
_DISCOUNT = 0.5
_EVERY_LOOP = np.iinfo(np.int16).max
# what is counted: stages and their rows, tokens, codas whose result is waited for, and rows of draft lanes
_CORES, _ROWS, _CODAS, _CODA_ROWS, _PRELUDES, _PRELUDE_ROWS, _TOKENS, _AWAITED, _DRAFT_ROWS = range(9)


class DraftSetting(NamedTuple):
    """A candidate."""

    lanes: int  # draft lanes of a chain, at most; 0 = no drafts
    depth: int  # loops after which a row may be read for its draft
    asks: int  # chains of fewer draft lanes ask for a coda
    pause: int  # core steps between boundaries, at least


class DraftCosts(NamedTuple):
    """Seconds, at the present context."""

    core: float  # a core step
    core_row: float  # and each of its rows
    coda: float
    prelude: float  # where a coda starts or restarts a row: one that reads what has a successor already starts none
    coda_row: float
    prelude_row: float
    wait: float = 0.0  # lost with a coda that says whether rows behind are right, by waiting for it or by going on


def candidates(max_lanes: int, r_max: int, depth: int | None = None) -> tuple[DraftSetting, ...]:
    """Every setting that is tried; with ``depth`` those that draft at that depth."""
    pauses = [e for e in (1, 2, 3, 4, 6, 8, 12, 16) if e < max(r_max, 2)]
    lanes = [n for n in (1, 2, 3, 4, 6, 8) if n <= max_lanes]
    depths = (
        [d for d in (1, 2, 3, 4, 6, 8) if d < r_max and (r_max <= 4 or 2 * d <= r_max)] if depth is None else [depth]
    )
    drafting = [
        DraftSetting(n, d, m, e)
        for n in lanes
        for d in depths
        for m in sorted({0, 1, min(2, n), n})
        for e in (1, 2, 4)
        if e in pauses and (e == 1 or m)
    ]
    return (*(DraftSetting(0, 1, 0, e) for e in pauses), *drafting)


class DraftTournament:
    """Plays every candidate on the same depths and the same u_p, one core step at a time."""

    def __init__(self, settings: tuple[DraftSetting, ...], ordered: bool, rows_for: float = np.inf) -> None:
        """``ordered``: a row is read for good in a later boundary than the row ahead (coda has layers). ``rows_for``: so many
        draft lanes a stage has for every sequence; with more, rows that are read count until the next boundary."""
        self.settings = settings
        self._rules = ordered, rows_for
        undrafted = {setting.pause: index for index, setting in enumerate(settings) if not setting.lanes}
        self._undrafted = [undrafted[setting.pause] for setting in settings]
        self._u = np.random.default_rng(0).random((SEQUENCES, _DRAWS))
        self._depths: Int32Array | None = None
        self._accept: FloatArray = np.zeros(0)
        self._games: dict[int, _Game] = {}  # by sequences that share stages
        self._game: _Game | None = None  # of the present load

    def refresh(self, depths: Int32Array | None, accept: FloatArray, active: int) -> None:
        """New traffic: ``depths`` [SEQUENCES, n] successive exit depths, ``accept`` [r_max + 1] by draft depth, ``active``
        sequences."""
        if depths is None or not active:
            return
        if self._accept.size and np.abs(accept - self._accept).max() > _CHANGED:
            for game in self._games.values():
                game.discount()
            self._accept = accept.copy()
        elif not self._accept.size:
            self._accept = accept.copy()
        self._depths = depths
        group = 1 << min(active, SEQUENCES).bit_length() - 1
        if group not in self._games:
            self._games[group] = _Game(self.settings, group, *self._rules)
        self._game = self._games[group]

    @property
    def settled(self) -> bool:
        """True when enough has been played for a verdict."""
        return self._game is not None and self._game.most_rounds >= _MIN_ROUNDS

    @property
    def sure(self) -> bool:
        """True when more play hardly changes it."""
        return self._game is not None and self._game.rounds >= _SURE_ROUNDS

    def play(self) -> None:
        """One core step of every candidate, at the present load; nothing before there is traffic."""
        if self._game is not None and self._depths is not None:
            self._game.play(self._depths, self._u, self._accept)

    def seconds_per_token(self, costs: DraftCosts, active: int, spare_rows: float = np.inf) -> FloatArray:
        """[settings]; ``spare_rows``: of a core step, for draft lanes. Where a setting has more, the oldest sequences have
        their drafts and the others none: both kinds share core steps and boundaries."""
        assert self._game is not None
        group, counts = self._game.group, self._game.counts
        sequences = max(group, active)
        rate = counts / np.maximum(counts[_CORES], 1e-9)  # a core step
        with_drafts = np.minimum(1.0, spare_rows / np.maximum(rate[_DRAFT_ROWS] * sequences / group, 1e-9))
        rate[1:] = with_drafts * rate[1:] + (1.0 - with_drafts) * rate[1:, self._undrafted]
        _, rows, codas, coda_rows, preludes, prelude_rows, tokens, awaited, _ = rate
        spent = costs.core + codas * costs.coda + preludes * costs.prelude + awaited * costs.wait
        scale = sequences / group
        spent += scale * (rows * costs.core_row + coda_rows * costs.coda_row + prelude_rows * costs.prelude_row)
        out: FloatArray = spent / np.maximum(tokens * scale, 1e-9)
        return out


class _Game:
    """All candidates, with groups of so many sequences that share their stages. Arrays by sequence are
    [candidates * SEQUENCES], a candidate's groups side by side; arrays by lane [lanes, candidates * SEQUENCES], oldest first."""

    def __init__(self, settings: tuple[DraftSetting, ...], group: int, ordered: bool, rows_for: float) -> None:
        n = len(settings)
        self.group = group
        self.rounds = 0.0  # with forgetting
        self.most_rounds = 0.0  # there have ever been
        self.counts = np.zeros((_DRAFT_ROWS + 1, n))
        self._ordered = ordered
        self._lanes, self._depth, self._asks, _ = np.repeat(np.array(settings), SEQUENCES, axis=0).T
        self._early = self._lanes <= rows_for  # the result of a boundary does not come before its drafts
        self._pause = np.repeat([setting.pause for setting in settings], SEQUENCES // group)
        self._width = lanes_of_a_slot(int(self._lanes.max()))
        self._slot = np.tile(np.arange(SEQUENCES), n)
        self._sequence = np.arange(n * SEQUENCES)
        self._base = 7 * self._slot  # position of lane 0
        self._alive = np.zeros(n * SEQUENCES, np.int64)  # lanes of the chain
        self._state = np.zeros((4, self._width, n * SEQUENCES), np.int16)
        self._loop, self._exit, self._right, self._done = self._state
        # exit: loops the lane will run, 0 = no lane; right: its input; done: 1 = its planes are filled, 2 = read for good
        self._since = np.zeros(self._pause.size, np.int64)

    def play(self, depths: Int32Array, u: FloatArray, accept: FloatArray) -> None:
        """A core step, and a boundary where one is due. Arguments as the tournament has them."""
        if not self.rounds:
            self._start(np.arange(self._alive.size), 1, depths)
        self.rounds = _KEEP * self.rounds + 1.0
        self.most_rounds = max(self.most_rounds, self.rounds)
        loop, exits, done = self._loop, self._exit, self._done
        self.counts *= _KEEP
        self._count(_DRAFT_ROWS, np.count_nonzero((exits > 0) & (done < 2), axis=0) - 1)
        run = loop < exits
        written = np.minimum.accumulate(np.where(done, np.int16(_EVERY_LOOP), loop), axis=0)
        run[1:] &= loop[1:] < written[:-1]
        loop += run
        ran = run.sum(axis=0)
        busy = self._in_group(ran > 0)
        tail = self._sequence + (self._alive - 1) * self._sequence.size
        tail_loop = loop.reshape(-1).take(tail)
        unread = (loop >= exits) & (exits > 0) & (done < 2)
        final = unread.copy()
        if self._ordered:
            final[1:] &= done[:-1] == 2
        leaving = self._early * np.count_nonzero(final | (done == 2), axis=0)
        left = self._alive - leaving  # of the chain, as the next boundary has it
        self._since += 1
        asks = tail_loop >= self._depth
        if not self._ordered:
            asks |= unread.reshape(-1).take(tail)
        asks &= left <= self._asks
        go = self._in_group(unread[0] | asks) & ((self._since >= self._pause) | ~busy)
        self._since[go] = 0
        self._count(_CORES, busy)
        self._count(_ROWS, ran)
        self._count(_CODAS, go)
        go = np.repeat(go, self.group)
        unread &= go
        final &= go
        read = final | unread & (done == 0)
        self._count(_CODA_ROWS, np.count_nonzero(read, axis=0))
        self._count(_AWAITED, self._in_group(final.any(axis=0) & (self._alive > 1)))
        done[unread] = 1
        done[final] = 2
        # a tail that is read for good gives its successor the token itself, any other a draft
        final_tail, read_tail = final.reshape(-1).take(tail), read.reshape(-1).take(tail)
        drafts = (tail_loop >= self._depth) & (left <= self._lanes)
        born = np.flatnonzero(go & (self._alive < self._width) & (drafts | final_tail))
        certain = final_tail[born]
        positions = self._base[born] + self._alive[born]
        knows = u[self._slot[born], positions % _DRAWS] < accept[tail_loop[born]]
        self._count_at(_CODA_ROWS, born[~read_tail[born]])
        self._start(born, certain | knows, depths)
        starts = np.zeros(go.size, np.bool_)
        starts[born] = True
        self._commit(np.flatnonzero(go & (done[0] == 2)), depths, starts)
        self._count(_PRELUDES, self._in_group(starts))

    def discount(self) -> None:
        """What was played counts for less."""
        self.counts *= _DISCOUNT
        self.rounds *= _DISCOUNT

    def _commit(self, known: npt.NDArray[np.intp], depths: Int32Array, starts: BoolArray) -> None:
        """Heads that were read are tokens; a successor whose input was wrong starts anew, without its chain. ``starts``
        [sequences] is set where one does."""
        while known.size:
            self._count_at(_TOKENS, known)
            self._base[known] += 1
            self._alive[known] -= 1
            lanes = self._state[:, :, known]
            lanes[:, :-1] = lanes[:, 1:]
            lanes[:, -1] = 0
            wrong = lanes[2, 0] == 0  # or there is none
            lanes[:, :, wrong] = 0
            self._state[:, :, known] = lanes
            anew = known[wrong]
            self._alive[anew] = 0
            self._start(anew, 1, depths)
            starts[anew] = True
            known = known[lanes[3, 0] == 2]

    def _start(self, sequences: npt.NDArray[np.intp], right: BoolArray | int, depths: Int32Array) -> None:
        """Their next position, in the lane behind their chain."""
        lane = self._alive[sequences]
        positions = self._base[sequences] + lane
        self._alive[sequences] = lane + 1
        at = sequences + lane * self._sequence.size
        state = self._state.reshape(4, -1)
        state[0, at] = state[3, at] = 0
        state[1, at] = depths[self._slot[sequences], positions % depths.shape[1]]
        state[2, at] = right
        self._count_at(_PRELUDE_ROWS, sequences)

    def _in_group(self, of_sequences: BoolArray) -> BoolArray:
        """[groups] whether it holds for any of a group."""
        out: BoolArray = np.logical_or.reduce(of_sequences.reshape(-1, self.group), axis=1)
        return out

    def _count(self, index: int, values: npt.NDArray[np.generic]) -> None:
        """``values`` by sequence or by group."""
        self.counts[index] += values.reshape(self.counts.shape[1], -1).sum(axis=1)

    def _count_at(self, index: int, sequences: npt.NDArray[np.intp]) -> None:
        self.counts[index] += np.bincount(sequences // SEQUENCES, minlength=self.counts.shape[1])
