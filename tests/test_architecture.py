"""The rules of the architecture that a careless import or a missing line of packaging would break in silence."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "scheduler", "worker", "frontend", "deploy", "training", "benchmarks")
MAY_IMPORT = {  # common <- scheduler, worker <- frontend <- deploy, benchmarks
    "common": {"common"},
    "scheduler": {"common", "scheduler"},
    "worker": {"common", "worker"},
    "frontend": {"common", "frontend"},
    "deploy": set(PACKAGES),
    "training": {"common", "worker", "training"},
    "benchmarks": set(PACKAGES),
}
LINE_LIMIT = 520


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imported_packages(path: Path) -> Iterator[str]:
    """Packages of ours that a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "depthbatch" and len(parts) > 1 and parts[1] in PACKAGES:
                yield parts[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    """Found in the source, so imports inside functions count too."""
    wrong = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path in sources(package)
        for other in imported_packages(path)
        if other not in MAY_IMPORT[package]
    }
    assert not wrong


IMPORTS_BY_NAME = ("deploy/cli/main.py", "worker/models/registry.py")  # commands, and files of worker/models


def test_cuda_extra_is_installed_without_isolation() -> None:
    """Bug: `pip install '.[cuda]'` failed: flash-attn's build imports torch, which an isolated build does not see."""
    for path in (ROOT / "deploy" / "Dockerfile.cuda", ROOT / "docs" / "gpu.md"):
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if "[cuda]" in line]
        assert lines and all("--no-build-isolation" in line for line in lines)
        assert (
            text.index("torch==2.13.0")
            < text.index("'setuptools>=77' wheel packaging psutil ninja")
            < text.index("[cuda]")
        )


def test_nothing_is_unpickled() -> None:
    """Row "pickle over ZMQ, type names from the wire, 0.0.0.0 binds": no source of ours so much as imports what turns
    bytes into objects of any type, and torch.load, which can, is asked for weights only. Nothing is evaluated, no name is
    looked up among all there are, and modules are imported by name from our own tables alone."""
    for package in PACKAGES:
        for path in sources(package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names), path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec", "compile", "globals", "vars", "locals"}, path
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                    assert (
                        isinstance(node.args[0], ast.Constant) or path.relative_to(ROOT).as_posix() in IMPORTS_BY_NAME
                    )
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    assert any(
                        word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords
                    )


READ_DIRECTLY = {
    "common/grammar_program.py": "/proc",
    "common/messages.py": "our sources",
    "common/os_process.py": "/proc",
    "common/run_dir.py": "the run directory",
    "common/text_files.py": "the home",
    "benchmarks/fleet_sweep.py": "its own results",
    "benchmarks/frontends.py": "pids of the run directory",
    "benchmarks/gpu/check.py": "its own results",
    "benchmarks/gpu/ranks.py": "/proc",
    "benchmarks/paper_cpu.py": "its own results",
    "benchmarks/paper_judges.py": "its own results",
    "benchmarks/service_figures.py": "the server's log, /proc",
    "benchmarks/soak.py": "/proc",
    "benchmarks/sources.py": "bytes, decoded by text_files",
    "benchmarks/sweep.py": "its own results",
    "benchmarks/trace.py": "the scheduler's trace",
    "benchmarks/trace_pictures.py": "the scheduler's trace",
    "deploy/cli/generate.py": "bytes, decoded by text_files",
    "frontend/http/operations.py": "the scheduler's trace",
    "frontend/http/page.py": "our own page",
    "frontend/processes.py": "logs of processes",
    "frontend/siblings.py": "msgpack of the run directory",
    "training/data.py": "text that ships",
    "worker/device.py": "/proc, /sys",
    "worker/layers/cpu/compile.py": "our sources, /proc",
}  # what is read there is written by machines, without a byte-order mark


def reads_a_file(call: ast.Call) -> bool:
    """By any of the ways there are."""
    name = ast.unparse(call.func)
    if name == "open" or name.endswith(".open"):
        mode = next((a.value for a in call.args[name == "open" :] if isinstance(a, ast.Constant)), "r")
        return name != "os.open" and not set(str(mode)) & set("wax")
    return name in ("json.load", "tomllib.load") or name.endswith((".read_text", ".read_bytes"))


def test_byte_order_marks_are_taken_off_in_one_place() -> None:
    """Bug: device profiles, training data and the grammar host's tokenizer were not read when an editor had put a
    byte-order mark before them. What people write is read by common.text_files."""
    direct = set()
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            by_hand = isinstance(node, ast.Constant) and node.value == "utf-8-sig"
            reads = isinstance(node, ast.Call) and reads_a_file(node) and "text_files." not in ast.unparse(node)
            if by_hand or reads:
                direct.add(str(path.relative_to(ROOT)))
    of_the_run_directory = {name for name in direct if name.startswith("deploy/supervise/")}
    assert direct - of_the_run_directory == set(READ_DIRECTLY)


def test_arrows_are_seen() -> None:
    """The test above would pass on anything if it found no imports at all."""
    assert "common" in set(imported_packages(ROOT / "scheduler" / "process.py"))
    assert "worker" in set(imported_packages(ROOT / "deploy" / "cli" / "info.py"))  # inside a function


def run_python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("depthbatch.scheduler.process", ("torch", "transformers", "tokenizers")),
        ("depthbatch.worker.__main__", ("torch",)),
        ("depthbatch.worker.rank", ("torch",)),
        ("depthbatch.worker.rank_processes", ("torch",)),
        ("depthbatch.worker.build", ("torch._dynamo", "depthbatch.worker.ranks")),
        ("depthbatch.frontend.llm", ("torch", "transformers")),
        ("depthbatch.deploy.cli.main", ("torch", "transformers", "numpy", "zmq")),
    ],
)
def test_heavy_imports_stay_out(module: str, forbidden: tuple[str, ...]) -> None:
    """At run time, in a process of its own: what others import on the way counts too. The scheduler must not hold device
    libraries; the frontend and the command must start at once; torch reads what the worker's main sets for it."""
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


def test_the_scheduler_process_loads_its_own_package_and_common_alone() -> None:
    """Frontend or worker code that comes in by a detour. numpy is named as a control: the check sees modules."""
    code = "import sys, depthbatch.scheduler.process; print(' '.join(sys.modules))"
    modules = run_python(code).stdout.split()
    assert "numpy" in modules
    assert {name.split(".")[1] for name in modules if name.startswith("depthbatch.")} == {"common", "scheduler"}


def test_help_starts_without_torch() -> None:
    """Also with a benchmark's or a training command's own arguments listed by name."""
    code = (
        "import sys; sys.argv = ['depthbatch', '--help']\n"
        "from depthbatch.deploy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)\n"
    )
    lines = run_python(code).stdout.splitlines()
    assert lines[-1] == "0 False"
    assert any("generate" in line for line in lines)


def test_package_list_equals_the_tree() -> None:
    """A package that is missing from the list is missing from the wheel, while the checkout still works."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    in_tree = {"depthbatch"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            in_tree.add("depthbatch." + ".".join(path.parent.relative_to(ROOT).parts))
    assert set(setup["packages"]) == in_tree
    without_init = [
        path.parent for package in PACKAGES for path in sources(package) if not (path.parent / "__init__.py").exists()
    ]
    assert not without_init


def test_no_file_needs_a_table_of_contents() -> None:
    files = [path for package in (*PACKAGES, "tests") for path in sources(package)]
    assert len(files) > 50
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > LINE_LIMIT}
    assert not long
