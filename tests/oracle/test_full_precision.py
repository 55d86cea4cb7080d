"""TF32 is off while curvature is computed, whatever switches the user has used, and as it was afterwards."""

import json
import subprocess
import sys

SETTINGS = {
    "nothing": "",
    "old, on": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = True",
    "old, off": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = False",
    "words": "torch.set_float32_matmul_precision('high')",
    "new, of convolutions": "b.cudnn.conv.fp32_precision = 'ieee'",
    "new, of products": "b.cuda.matmul.fp32_precision = 'tf32'",
    "new, of all": "b.fp32_precision = 'ieee'",
}
#: Torch does not forget which kind of switch was used, so each setting has a process, forked from one that has torch.
PROGRAM = """
import json, os, sys
import torch
from secondorder.linalg.dense import full_precision
b = torch.backends
new = hasattr(b.cudnn, "conv")

def seen():
    parts = (b.cuda.matmul, b.cudnn.conv) if new else (b.cuda.matmul, b.cudnn)
    return tuple(part.fp32_precision if new else part.allow_tf32 for part in parts)

def check(setting):
    exec(setting)
    before = seen()
    with full_precision(torch.device("cuda")):
        assert seen() == (("ieee", "ieee") if new else (False, False)), seen()
    assert seen() == before, (before, seen())

failed = []
for name, setting in json.loads(sys.argv[1]).items():
    if name.startswith("new") and not new:
        continue  # this torch has the old ones only
    if not (child := os.fork()):
        try:
            check(setting)
        except BaseException as error:
            print(name, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_switches_of_either_kind():
    """This needs no device."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(SETTINGS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
