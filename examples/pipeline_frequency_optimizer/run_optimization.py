"""Plans the clock of every instruction of a pipeline; see --help.

python run_optimization.py --inst-profile profile.csv --output-dir plans --num-stages 4 --num-mbs 8
"""

from zeus.optimizer.pipeline_frequency.command import main

if __name__ == "__main__":
    main(prog_name="run_optimization.py")
