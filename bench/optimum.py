"""Compare the heuristics with the proven optimum, on small training graphs.

`./x bench optimum [COUNT]`: random chains with skips and real recorded shapes of up to 25 operators,
two budgets each; the geometric mean of the ratio of the best heuristic to the optimum.
"""

from __future__ import annotations

import math
import random
import sys
import time

from gradkeep.remat import Graph, chain, optimal, simulate, unlimited_peak
from tests.remat.plain_remat import training_program

HEURISTICS = ("dtr", "dtr-eq", "dtr-local", "msps", "lru", "largest")


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else 24
    rng = random.Random(0)
    programs = [chain(length) for length in (5, 8, 10, 12)]
    programs += [training_program(rng, rng.randint(5, 12)) for _ in range(count - len(programs))]
    logs, below, compared = [], 0, 0
    for number, program in enumerate(programs):
        graph = Graph.of(program)
        for ratio in (0.75, 0.55):
            budget = max(
                graph.bottleneck, int(ratio * (unlimited_peak(program) - graph.constant_bytes))
            )
            start = time.monotonic()
            best = optimal(graph, budget=budget, time_limit=60)
            spent = time.monotonic() - start
            if best.schedule is None:
                print(f"{number:>3} {len(graph):>3} nodes  {ratio}: {best.status} ({spent:.1f} s)")
                continue
            outcomes = {
                name: simulate(
                    program, heuristic=name, budget=budget + graph.constant_bytes, limit=20
                )
                for name in HEURISTICS
            }
            good = {
                name: outcome.compute - 1
                for name, outcome in outcomes.items()
                if outcome.status == "ok"
            }
            below += sum(cost < best.bound - 1e-6 for cost in good.values())
            compared += len(good)
            if not good:
                print(
                    f"{number:>3} {len(graph):>3} nodes  {ratio}: no heuristic fits ({spent:.1f} s)"
                )
                continue
            name = min(good, key=lambda item: good[item])
            logs.append(math.log(good[name] / best.schedule.compute))
            print(
                f"{number:>3} {len(graph):>3} nodes  {ratio}: optimum "
                f"{best.schedule.compute / graph.compute:.3f}x (gap {best.gap:.1%}, {spent:.1f} s), "
                f"best heuristic {name} {good[name] / graph.compute:.3f}x"
            )
    mean = math.exp(sum(logs) / len(logs))
    print(
        f"{len(programs)} graphs, {len(logs)} budgets: geometric mean of best heuristic / optimum "
        f"{mean:.3f} (target <= 1.15); {below} of {compared} outcomes below the optimum (must be 0)"
    )
    return int(below > 0 or mean > 1.15)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
