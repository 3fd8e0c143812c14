"""The tree keeps its rules: who imports whom, one door to each heavy library, nothing too long.

The rules are those of the design's chapter on the tree. Imports are read from the source of every
file, those inside functions too; what an import loads is seen in a fresh process.
"""

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from child import run_child

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("artifacts", "stages", "flows")
STAGES = ("rollout", "score", "update")

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
# Names that say nothing of what is inside.
EMPTY_NAMES = {"utils", "util", "common", "base", "helpers", "types", "core", "misc"}

# Each heavy library, and the only files that import it. A new file here is a decision.
DOORS = {
    "duckdb": {"flows/look.py"},
    "httpx": {"stages/score/judge.py"},
    "jsonschema": {"stages/score/builtin/structure.py"},
    "math_verify": {"stages/score/builtin/math_answer.py"},
    "mlflow": {"flows/tracking.py"},
    "prefect": {"flows/train.py"},
    "ray": {"stages/ray_cluster.py"},
    "safetensors": {"stages/update/memory.py", "stages/update/snapshot.py"},
    "tokenizers": {"stages/score/tokens.py"},
    "torch": {
        "flows/doctor.py",
        "stages/arrays.py",
        "stages/logprobs.py",
        "stages/models.py",
        "stages/packed.py",
        "stages/rollout/hf_engine.py",
        "stages/rollout/vllm_engine.py",
        "stages/score/reference.py",
        "stages/score/reward_model.py",
        "stages/sequence_parallel.py",
        "stages/update/correction.py",
        "stages/update/critic.py",
        "stages/update/export.py",
        "stages/update/group.py",
        "stages/update/kl.py",
        "stages/update/loss_inputs.py",
        "stages/update/losses.py",
        "stages/update/mesh.py",
        "stages/update/microbatch.py",
        "stages/update/phases.py",
        "stages/update/preferences.py",
        "stages/update/randomness.py",
        "stages/update/sharding.py",
        "stages/update/step_sums.py",
        "stages/update/trainer.py",
        "stages/update/value_model.py",
        "stages/update/value_step.py",
    },
    "transformers": {
        "stages/models.py",
        "stages/packed.py",
        "stages/rollout/hf_engine.py",
        "stages/rollout/prompts.py",
        "stages/score/reward_model.py",
        "stages/update/export.py",
    },
    "vllm": {"stages/rollout/vllm_engine.py"},
}

# What answers before a model is touched, and so loads nothing heavy.
LIGHT = [
    "artifacts.runs",
    "flows",
    "flows.cli",
    "flows.config",
    *(f"stages.{stage}.{module}" for stage in STAGES for module in ("config", "run")),
]
HEAVY = ["torch", "vllm", "ray", "mlflow", "prefect", "transformers"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no files in {package}: the layout test looks in the wrong place"
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Dotted names of all that ``path`` imports, anywhere in it."""
    return {name for node in ast.walk(tree_of(path)) for name in _names_in(node, path)}


def _names_in(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import; write it out"
        # `from stages import update` imports a module, `from stages.update import run` may.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def test_artifacts_imports_only_the_standard_library_pyarrow_and_fsspec() -> None:
    allowed = sys.stdlib_module_names | {"artifacts", "pyarrow", "fsspec"}
    assert {name_of(path): tops(path) - allowed for path in files("artifacts")} == {
        name_of(path): set() for path in files("artifacts")
    }


def test_stages_never_import_flows() -> None:
    assert [name_of(path) for path in files("stages") if "flows" in tops(path)] == []


@pytest.mark.parametrize("stage", STAGES)
def test_stage_never_imports_another_stage(stage: str) -> None:
    others = tuple(f"stages.{other}" for other in STAGES if other != stage)
    found = {
        (name_of(path), name)
        for path in files(f"stages/{stage}")
        for name in imports(path)
        if name.startswith(others)
    }
    assert found == set()


def test_shared_stage_code_imports_no_stage() -> None:
    inside = tuple(f"stages.{stage}" for stage in STAGES)
    found = {
        (name_of(path), name)
        for path in (ROOT / "stages").glob("*.py")
        for name in imports(path)
        if name.startswith(inside)
    }
    assert found == set()


def test_stages_folders_are_the_stages() -> None:
    folders = {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")}
    assert folders == set(STAGES)


@pytest.mark.parametrize("library", DOORS)
def test_heavy_library_has_only_its_doors(library: str) -> None:
    users = {name_of(p) for package in PACKAGES for p in files(package) if library in tops(p)}
    assert users == DOORS[library]


LOADER = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps({"file": module.__file__, "heavy": heavy}))
"""


@pytest.mark.parametrize("module", LIGHT)
def test_import_of_what_answers_at_once_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    found = json.loads(run_child(LOADER, module, json.dumps(HEAVY), cwd=tmp_path))
    assert found["heavy"] == []
    # The names are common words: they must be this project's packages, not somebody else's.
    assert Path(found["file"]).is_relative_to(ROOT / module.partition(".")[0])


def test_files_are_short_enough_to_see() -> None:
    lengths = {name_of(p): len(p.read_text().splitlines()) for k in PACKAGES for p in files(k)}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_fit_on_a_screen() -> None:
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for package in PACKAGES
        for path in files(package)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def test_files_have_names_that_say_what_is_inside() -> None:
    stems = {name_of(path): path.stem for package in PACKAGES for path in files(package)}
    assert {name for name, stem in stems.items() if stem in EMPTY_NAMES} == set()


# Each of these runs what it reads.
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code"}
CALLS_THAT_RUN = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def test_nothing_that_is_read_is_unpickled_or_executed() -> None:
    paths = [path for package in PACKAGES for path in files(package)]
    assert {name_of(path) for path in paths if tops(path) & RUNS_WHAT_IT_READS} == set()
    calls = {
        f"{name_of(path)}:{node.lineno} {ast.unparse(node.func)}"
        for path in paths
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and _runs_what_it_gets(node)
    }
    assert calls == set()


def _runs_what_it_gets(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    keywords = {keyword.arg for keyword in call.keywords}
    return (
        name in CALLS_THAT_RUN | LOADERS
        or name.endswith(".read_pickle")
        or bool(keywords & {"allow_pickle", "trust_remote_code"})
    )


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch.load(path)", True),
        ("np.load(path, allow_pickle=True)", True),
        ("eval(text)", True),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", True),
        ("safetensors.numpy.load(data)", False),
        ("yaml.safe_load(text)", False),
        ("json.loads(data)", False),
    ],
)
def test_search_for_calls_that_run_what_they_get_finds_them(line: str, is_found: bool) -> None:
    assert _runs_what_it_gets(ast.parse(line).body[0].value) is is_found
