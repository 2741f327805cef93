"""Runs lowtime (pip install lowtime) on one pipeline; pipeline_frequency.py starts it.

Reads a JSON object from standard input: nodes (stage, name, microbatch), arcs, options by
stage and name, blocking power, unit of time, seconds to run. Writes a line of JSON for every plan:
CPU seconds since the start and the clock of every node.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Solves, and prints plans as they come."""
    work = json.load(sys.stdin)
    began = time.process_time()
    import networkx as nx
    from lowtime.cost_model import ExponentialModel
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption, OperationSpec
    from lowtime.perseus.instruction import Backward, Forward
    from lowtime.solver import PhillipsDessouky

    unit, power_w = work["unit_time_s"], work["power_w"]
    kinds = {"forward": Forward, "backward": Backward}
    specs = {}
    for stage, names in enumerate(work["options"]):
        for name, rows in names.items():
            options = []
            for mhz, time_s, energy_j in rows:
                option = ExecutionOption(real_time=time_s, unit_time=unit, cost=energy_j, knob=mhz)
                option.cost -= power_w * option.quant_time * unit
                options.append(option)
            chosen = CandidateExecutionOptions(options=options)
            if len(chosen.options) <= 3:
                chosen = CandidateExecutionOptions(options=options, noise_factor=0.95)
            model = ExponentialModel(chosen, search_strategy="best")
            specs[stage, name] = OperationSpec(options=chosen, cost_model=model)
    graph = nx.DiGraph()
    operations = []
    for number, (stage, name, microbatch) in enumerate(work["nodes"], start=2):
        operation = kinds[name](stage_id=stage, micro_batch_id=microbatch, spec=specs[stage, name])
        operations.append(operation)
        graph.add_node(number, op=operation)
    graph.add_edges_from((tail + 2, head + 2) for tail, head in work["arcs"])
    add_source_node(graph, 0)
    add_sink_node(graph, 1)
    graph.graph["source_node"], graph.graph["sink_node"] = 0, 1
    for _ in PhillipsDessouky(graph).run():
        clocks = [operation.assigned_knob for operation in operations]
        elapsed_s = time.process_time() - began
        print(json.dumps({"elapsed_s": elapsed_s, "clocks": clocks}), flush=True)
        if elapsed_s > work["seconds"]:
            print(json.dumps({"stopped": True}), flush=True)
            return


if __name__ == "__main__":
    main()
