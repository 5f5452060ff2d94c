"""``depthbatch bench eval URL``: public tasks asked of a running server, at several loop counts and exit thresholds.

Tasks of lm-eval through its ``local-completions`` and ``local-chat-completions``, which need their data sets; tasks of
reasoning-gym, which are made up as they are asked and need nothing. Both are optional (the extra ``eval``). How deep the
tokens went is read off the server's metrics, so nobody else should use it meanwhile.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from depthbatch.benchmarks.figures import draw_scores, import_pyplot, picture_file
from depthbatch.benchmarks.record import add_output_argument, write_json
from depthbatch.common.arguments import loops, natural, positive, seed, threshold
from depthbatch.common.errors import ConfigError, DepthbatchError

Row = dict[str, Any]
TIMEOUT_S = 600.0
_DEPTH = re.compile(r"^depthbatch:exit_depth_(sum|count)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Setting(NamedTuple):
    """How deep tokens go: the server's default, a fixed number of loops, or a gate's threshold."""

    num_loops: int | None = None
    exit_threshold: float | None = None
    gate: str | None = None

    @property
    def fields(self) -> Row:
        """What a request says of it."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @property
    def label(self) -> str:
        if self.num_loops is not None:
            return f"{self.num_loops} loops" if self.num_loops > 1 else "1 loop"
        return "the server's default" if self.exit_threshold is None else f"threshold {self.exit_threshold:g}"


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, tasks, depths, where results go."""
    parser.add_argument("url", metavar="URL", help="a running server, as http://HOST:PORT")
    parser.add_argument("--lm-eval", metavar="TASK", action="append", default=[], help="task of lm-eval; repeat")
    parser.add_argument("--reasoning-gym", metavar="TASK", action="append", default=[], help="its task; repeat")
    parser.add_argument("--num-loops", metavar="N", type=loops, action="append", default=[], help="fixed depth; repeat")
    parser.add_argument("--exit-threshold", metavar="T", type=threshold, action="append", default=[], help="repeat")
    parser.add_argument("--gate", help="of --exit-threshold (default: the server's)")
    parser.add_argument("--size", type=positive, default=100, help="most questions a task (default 100)")
    parser.add_argument("--max-tokens", type=positive, default=512, help="of an answer to reasoning-gym (default 512)")
    parser.add_argument(
        "--num-fewshot", type=natural, help="examples in front of a question of lm-eval (default: the task's)"
    )
    parser.add_argument("--include-path", type=Path, help="directory of further lm-eval tasks")
    parser.add_argument("--chat", action="store_true", help="questions are a user's messages, in the model's template")
    parser.add_argument("--instruction", default="", help="text behind every question of reasoning-gym")
    parser.add_argument("--concurrency", type=positive, default=16, help="requests at a time (default 16)")
    parser.add_argument("--seed", type=seed, default=0, help="of the questions of reasoning-gym")
    add_output_argument(parser)
    parser.add_argument("--figure", metavar="FILE.png", type=picture_file, help="draw scores against depth")


def run_eval(args: argparse.Namespace) -> int:
    """Every task at every depth. Raises ConfigError for bad options or a package that is not there, DepthbatchError where the
    server does not answer."""
    if not args.lm_eval and not args.reasoning_gym:
        raise ConfigError("no task: --lm-eval TASK or --reasoning-gym TASK")
    if not args.lm_eval and (args.num_fewshot is not None or args.include_path is not None):
        raise ConfigError("--num-fewshot and --include-path need --lm-eval")
    if args.include_path is not None and not args.include_path.is_dir():
        raise ConfigError(f"--include-path {args.include_path} is not a directory")
    if not args.reasoning_gym and (args.instruction or args.seed):
        raise ConfigError("--instruction and --seed need --reasoning-gym")
    if args.gate is not None and not args.exit_threshold:
        raise ConfigError("--gate needs --exit-threshold")
    if args.figure is not None:
        import_pyplot()
    settings = [Setting(num_loops=n) for n in args.num_loops]
    settings += [Setting(exit_threshold=t, gate=args.gate) for t in args.exit_threshold]
    server = Server(args.url)
    rows = list(_rows(args, server, settings or [Setting()]))
    report = {"model": server.model, "size": args.size, "chat": args.chat, "rows": rows}
    print(table(rows), file=sys.stderr)
    write_json(report, args.output)
    if args.figure is not None:
        draw_scores(report, args.figure)
    return 0


def _rows(args: argparse.Namespace, server: "Server", settings: Sequence[Setting]) -> Iterator[Row]:
    for setting in settings:
        for name in args.reasoning_gym:
            with server.depths() as depths:
                score = ask_gym(args, server, name, setting)
            yield _row("reasoning-gym", name, "score", setting, score, depths.mean)
        for name in args.lm_eval:
            with server.depths() as depths:
                scores = ask_lm_eval(args, server, name, setting)
            for metric, score in scores.items():
                yield _row("lm-eval", name, metric, setting, score, depths.mean)


def _row(suite: str, task: str, metric: str, setting: Setting, score: float, depth: float | None) -> Row:
    asked = {"suite": suite, "task": task, "metric": metric, "setting": setting.label} | setting._asdict()
    return asked | {"score": score, "mean_depth": depth}


class Depths:
    """Mean exit depth of the tokens that a server has given while this was open; None where there were none."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.mean: float | None = None

    def __enter__(self) -> "Depths":
        self._before = self._server.depth_counter()
        return self

    def __exit__(self, *_: object) -> None:
        total, count = (
            after - before for after, before in zip(self._server.depth_counter(), self._before, strict=True)
        )
        self.mean = total / count if count else None


class Server:
    """A running server. Raises DepthbatchError wherever it does not answer, or with an error."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server; it begins with http:// or https://")
        self._client = httpx.Client(timeout=TIMEOUT_S)
        self.model = str(self._get("/v1/models").json()["data"][0]["id"])

    def depths(self) -> Depths:
        """Counts the depth of tokens while it is open."""
        return Depths(self)

    def depth_counter(self) -> tuple[float, float]:
        """Loops of all tokens so far, and tokens."""
        sums = {"sum": 0.0, "count": 0.0}
        for kind, value in _DEPTH.findall(self._get("/metrics").text):
            sums[kind] += float(value)
        return sums["sum"], sums["count"]

    def answer(self, question: str, chat: bool, fields: Row) -> str:
        """The greedy answer to a question."""
        body = {"model": self.model, "temperature": 0.0} | fields
        asked: Row = {"prompt": question}
        if chat:
            asked = {"messages": [{"role": "user", "content": question}]}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        choice = self._checked("POST", path, json=body | asked).json()["choices"][0]
        return str(choice["message"]["content"] if chat else choice["text"])

    def _get(self, path: str) -> httpx.Response:
        return self._checked("GET", path)

    def _checked(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._client.request(method, self.url + path, **options)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self.url} is no address: {error}") from None
        except httpx.HTTPError as error:
            raise DepthbatchError(f"{self.url}{path} does not answer: {error}") from None
        if response.status_code != 200:
            raise DepthbatchError(f"{self.url}{path} says {response.status_code}: {response.text[:300]}")
        return response


@contextmanager
def _of_the_extra(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{package} is not installed ({error}): pip install 'depthbatch[eval]'") from None


def ask_gym(args: argparse.Namespace, server: Server, name: str, setting: Setting) -> float:
    """Mean score, 0 to 1, of a task of reasoning-gym: its own judge gives an answer full or part of a point."""
    with _of_the_extra("reasoning-gym"):
        gym: Any = importlib.import_module("reasoning_gym")
    try:
        data = gym.create_dataset(name, size=args.size, seed=args.seed)
    except ValueError as error:
        raise ConfigError(f"--reasoning-gym {name}: {error}") from None
    fields = setting.fields | {"max_tokens": args.max_tokens}

    def score(index: int) -> float:
        entry = data[index]
        answer = server.answer(entry["question"] + args.instruction, args.chat, fields)
        return float(data.score_answer(answer.strip(), entry))

    with ThreadPoolExecutor(args.concurrency) as pool:
        scores = pool.map(score, range(args.size))
        told: list[float] = list(
            tqdm(scores, total=args.size, desc=f"{name}, {setting.label}", file=sys.stderr, mininterval=1.0)
        )
    return sum(told) / len(told)


def ask_lm_eval(args: argparse.Namespace, server: Server, name: str, setting: Setting) -> dict[str, float]:
    """Scores of a task of lm-eval, by metric. Its requests carry the setting, so the task must be one that generates."""
    with _of_the_extra("lm-eval"):
        lm_eval: Any = importlib.import_module("lm_eval")
        tasks: Any = importlib.import_module("lm_eval.tasks")
    kind, path = ("local-chat-completions", "chat/completions") if args.chat else ("local-completions", "completions")
    manager = tasks.TaskManager(include_path=None if args.include_path is None else str(args.include_path))
    if name not in manager.all_tasks:
        raise ConfigError(f"--lm-eval {name}: lm-eval has no such task")
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": server.model,
            "base_url": f"{server.url}/v1/{path}",
            "num_concurrent": args.concurrency,
            "max_retries": 1,
        },
        tasks=[name],
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.size,
        gen_kwargs=setting.fields,
        apply_chat_template=args.chat,
        bootstrap_iters=0,
    )
    kinds = {config.get("output_type") for config in found["configs"].values()}
    if kinds != {"generate_until"} and setting.fields:
        raise ConfigError(f"--lm-eval {name} does not generate: start the server with the depth, and ask without one")
    return {
        metric: float(value)
        for metric, value in found["results"][name].items()
        if "," in metric and "stderr" not in metric  # METRIC,FILTER
    }


def table(rows: Sequence[Row]) -> str:
    """One line a task, metric and setting."""
    lines = [f"{'task':<28}{'metric':<30}{'depth':<22}{'mean loops':>10}{'score':>8}"]
    for row in rows:
        depth = "" if row["mean_depth"] is None else f"{row['mean_depth']:.2f}"
        lines.append(f"{row['task']:<28}{row['metric']:<30}{row['setting']:<22}{depth:>10}{100 * row['score']:>7.1f}%")
    return "\n".join(lines)
