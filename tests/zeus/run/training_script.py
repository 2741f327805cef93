"""A training script that trains nothing: training_script.py FOLDER BATCH_SIZE LR SEED ...

Does what FOLDER/script.json says of its batch size, and writes down what it was told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, batch_size, *_ = sys.argv[1:]
told = {name: value for name, value in os.environ.items() if name.startswith("ZEUS_")}
calls = Path(folder, "calls.jsonl")
with calls.open("a", encoding="utf-8") as file:
    more = {"cwd": os.getcwd(), "mine": os.environ.get("MINE")}
    file.write(json.dumps({"argv": sys.argv[2:], "env": told, **more}) + "\n")
does = json.loads(Path(folder, "script.json").read_text())[batch_size]
print(f"training with batch size {batch_size} ü")
if "result" in does:
    name = f"{told['ZEUS_JOB_ID']}+bs{batch_size}.train.json"
    Path(told["ZEUS_LOG_DIR"], name).write_text(json.dumps(does["result"]))
if does.get("sleeps"):

    def end(*signal: object) -> None:
        Path(folder, "asked").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(600)
for line in does.get("says", []):
    print(line, file=sys.stderr)
if does.get("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(does.get("code", 0))
