"""Check a user's script with pyright, which many editors use; tests/test_release.py checks it with mypy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pyright_agrees_with_the_script_of_a_user(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "typed" / "user_script.py", tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}), encoding="utf-8"
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stdout
    assert [finding["message"] for finding in report["generalDiagnostics"] if finding["severity"] == "error"] == []
