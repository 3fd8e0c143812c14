"""``ratchet doctor``: fine is said shortly; what is not comes with what to do."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tiny
from flows.cli import main


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``ratchet doctor`` at 100 columns: exit code, output, error."""

    def run(*args: str):
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "argv", ["ratchet", "doctor", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def findings(out: str) -> dict[str, dict]:
    return {finding["subject"]: finding for finding in json.loads(out)}


@pytest.fixture
def config(tmp_path: Path) -> dict:
    """A configuration that works; of its model there is what is read before one loads."""
    tiny.save_prompts(tmp_path / "data.jsonl")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "rewards.py").write_text("def fine(text, **row):\n    return 0.0\n")
    return {
        "store": str(tmp_path / "runs"),
        "model": str(tmp_path / "model"),
        "iterations": 1,
        "data": {"path": str(tmp_path / "data.jsonl"), "template": "plain", "batch_size": 4},
        "rollout": {"max_new_tokens": 4},
        "score": {"rewards": [{"fn": f"{tmp_path}/rewards.py:fine"}]},
    }


def write(folder: Path, config: dict) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_doctor_where_all_is_well_says_so_and_advises_nothing(doctor, tmp_path, config) -> None:
    code, out, _ = doctor(write(tmp_path, config))
    assert (code, out.splitlines()[-1]) == (0, "all is well")
    assert "pip install" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_doctor_of_a_working_config_leaves_nothing_in_its_store(doctor, tmp_path, config) -> None:
    code, out, _ = doctor(write(tmp_path, config), "--json")
    assert code == 0
    assert findings(out)["store"]["is_fine"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_doctor_of_a_broken_config_gives_its_sentence(doctor, tmp_path, config) -> None:
    config["model"] = str(tmp_path / "nowhere")
    code, out, _ = doctor(write(tmp_path, config), "--json")
    assert code == 1
    assert not findings(out)["config"]["is_fine"]
    assert "nowhere" in findings(out)["config"]["found"]


def test_doctor_of_a_store_that_is_a_file_says_what_to_check(doctor, tmp_path, config) -> None:
    (tmp_path / "runs").write_text("in the way")
    code, out, _ = doctor(write(tmp_path, config), "--json")
    assert code == 1
    assert not findings(out)["store"]["is_fine"]
    assert "rights" in findings(out)["store"]["remedy"]


def test_doctor_of_a_tracking_server_that_is_down_says_that_training_goes_on(
    doctor, tmp_path, config
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    code, out, _ = doctor(write(tmp_path, {**config, "tracking": {"uri": uri}}), "--json")
    assert code == 1
    assert uri in findings(out)["tracking"]["found"]
    assert "training goes on without it" in findings(out)["tracking"]["remedy"]


def test_doctor_where_another_package_hides_ours_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from flows.doctor import print_findings; print_findings(None, True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    hidden = findings(done.stdout)["import stages"]
    assert not hidden["is_fine"]
    assert hidden["found"] == str(tmp_path / "stages")
